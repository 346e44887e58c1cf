"""Recordings on the server: storing, listing, and reading them in parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Flow, Group, WayT, method
from attention_client.recording.recorded import Indices, Recording, query_of
from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics
from attention_contract.schemas.analyses.rollout import CombinedHeads, RecordingRollout, RolloutMethod
from attention_contract.schemas.analyses.similarity import ComparedTensor, RecordingSimilarity
from attention_contract.schemas.recordings import RecordingFile, RecordingInfo, RecordingList
from attention_contract.schemas.weights import StatisticName
from attention_contract.validation import validate
from attention_contract.wire import JSON, SAFETENSORS

RecordingLike = Recording | RecordingFile | Mapping[str, Any] | str | Path
"""A recording, its model of the contract or a dict of that, or the path of its file."""


class Recordings(Group[WayT]):
    """Calls that store and read recordings."""

    @method
    def create(self, recording: RecordingLike, **options: Unpack[CallOptions]) -> Call[RecordingInfo]:
        """Store a recording. The same content is stored once.

        Raises StoreFull if the server keeps too many, and TooLarge if it exceeds the server's limit alone.
        """
        if isinstance(recording, str | Path):
            recording = Recording.load(recording)
        file = recording.file() if isinstance(recording, Recording) else recording
        request = file if isinstance(file, RecordingFile) else validate(RecordingFile, file)
        return Call(operations.create_recording, request=request, options=options)

    @method
    def list(self, **options: Unpack[CallOptions]) -> Call[RecordingList]:
        """List every stored recording, the newest first."""
        return call(operations.list_recordings, locals())

    @method
    def get(self, id: str, **options: Unpack[CallOptions]) -> Call[RecordingInfo]:  # noqa: A002
        """Return model, text, tokens, attentions and tensors of a recording. Raises RecordingNotFound."""
        # In JSON, since the other form is the file.
        return replace(call(operations.get_recording, locals()), request=None, headers={"Accept": JSON})

    @method
    def read(
        self, id: str, layer: str | int | None = None, tensor: str | None = None, *,  # noqa: A002
        heads: Indices | None = None, queries: Indices | None = None, keys: Indices | None = None,
        pool: int | None = None, **options: Unpack[CallOptions],
    ) -> Call[RecordingInfo]:  # fmt: skip
        """Return a recording with a tensor, or a part of it, as ``value``.

        The arguments are those of ``Recording.read``. The dimensions stay: one head gives ``[1, Lq, Lk]``. Raises
        RecordingNotFound and InvalidRequest.
        """
        part = query_of(layer, tensor, heads, queries, keys, pool).model_dump(exclude_unset=True)
        return call(operations.get_recording, {"id": id, "options": options, **part})

    @method
    def download(self, id: str, **options: Unpack[CallOptions]) -> Flow[Recording]:  # noqa: A002
        """Return a whole recording, its tensors in memory. Raises RecordingNotFound."""
        whole = replace(cast("Operation[Any]", operations.get_recording), reply=RecordingFile)
        request = call(whole, {"id": id, "options": options})
        return Recording.of((yield replace(request, request=None, headers={"Accept": SAFETENSORS})))

    @method
    def statistics(
        self, id: str, *, statistics: Sequence[StatisticName] | None = None,  # noqa: A002
        layers: Sequence[str] | None = None, window: int = 8, sinks: int = 1,
        classes: Mapping[str, Sequence[str]] | None = None, **options: Unpack[CallOptions],
    ) -> Call[RecordingStatistics]:  # fmt: skip
        """Return statistics ``[H]`` of the weights of each recorded attention, reduced on the server.

        ``statistics`` names them; their formulas are those of ``HeadStatistics``, over the tokens of the recording.
        ``classes`` gives labels of tokens by name. Raises RecordingNotFound and InvalidRequest.
        """
        return call(operations.recording_statistics, locals())

    @method
    def similarity(
        self, id: str, *, tensor: ComparedTensor = "weights", layers: Sequence[str] | None = None,  # noqa: A002
        with_: str | None = None, with_layers: Sequence[str] | None = None, **options: Unpack[CallOptions],
    ) -> Call[RecordingSimilarity]:  # fmt: skip
        """Return the similarity of every pair of recorded heads or layers, read on the server.

        ``tensor``: weights are compared by Jensen-Shannon divergence in nats; q, k, v, context, output and hidden by
        linear CKA. ``with_`` is the id of another recording of the same tokens, and ``with_layers`` are its layers.
        Raises RecordingNotFound and InvalidRequest.
        """
        return call(operations.recording_similarity, locals())

    @method
    def rollout(
        self, id: str, *, method: RolloutMethod = "rollout", combine: CombinedHeads = "mean",  # noqa: A002
        residual: float = 0.5, discard: float = 0.0, layers: Sequence[str] | None = None,
        queries: Sequence[int] | None = None, **options: Unpack[CallOptions],
    ) -> Call[RecordingRollout]:  # fmt: skip
        """Return where the state of each token comes from, over the recorded layers of self-attention.

        ``rollout`` multiplies ``residual`` · I + (1 − ``residual``) · A of every layer, with A the mean,
        maximum or minimum of the heads (``combine``), less the share ``discard`` of the smallest weights;
        ``flow`` finds the maximum flow to each input, which costs much for each of the ``queries``. The values are
        ``[queries, tokens]``. Raises RecordingNotFound and InvalidRequest.
        """
        return call(operations.recording_rollout, locals())

    @method
    def delete(self, id: str, **options: Unpack[CallOptions]) -> Call[None]:  # noqa: A002
        """Remove a recording. Raises RecordingNotFound."""
        return call(operations.delete_recording, locals())
