"""``Recording``: the numbers that a model computed for a text, in memory or mapped from its file."""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_client.recording import recording_html
from attention_client.recording.mapped_tensors import MappedTensors
from attention_contract.errors import InvalidRequest
from attention_contract.recording_tensors import place_of
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.recordings import (
    RecordedAttention,
    RecordingFacts,
    RecordingFile,
    RecordingQuery,
    read_facts,
)
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_contract.wire import to_safetensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Indices = int | slice | Sequence[int] | str
"""One index, a ``start:stop`` slice, a list of indices, or these as text: ``"0,3"``, ``"0:4"``."""


@dataclass(frozen=True)
class Recording:
    """Hidden states, weights and taps of every layer for one text, with the labels of tokens, layers and heads.

    Tensors have the names and shapes of ``attention_contract.schemas.recordings``. A layer is named ``layers.0``, or
    ``encoder.0``, ``decoder.0`` and ``decoder.0.cross`` in a model with two stacks; a number stands for
    ``layers.{number}``.
    """

    facts: RecordingFacts
    """Model, text, tokens, names of attentions and heads, versions."""
    tensors: Mapping[str, Array]
    """Every tensor by its full name. Tensors of a mapped recording are read when they are asked for."""

    @classmethod
    def of(cls, file: RecordingFile) -> "Recording":
        """The recording that a file of the contract holds."""
        facts = {name: getattr(file, name) for name in RecordingFacts.model_fields}
        return cls(RecordingFacts(**facts), dict(file.tensors()))

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Map the file of a recording: its header is read, its tensors are not.

        Raises Unreadable for a file that holds no recording, and FileNotFoundError.
        """
        tensors = MappedTensors(Path(path))
        facts = read_facts(
            tensors.metadata.get(RecordingFile.file_entry), ((name, tensors.shape(name)) for name in tensors)
        )
        return cls(facts, tensors)

    def save(self, path: str | Path) -> Path:
        """Write the recording as one safetensors file, whole or not at all."""
        path = Path(path)
        staged = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            with staged.open("wb") as file:
                file.writelines(to_safetensors(self.file(), "recording"))
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        return path

    def file(self) -> RecordingFile:
        """The recording as the contract's model, with every tensor in memory."""
        return file_of({name: getattr(self.facts, name) for name in RecordingFacts.model_fields}, self.tensors)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def attentions(self) -> list[RecordedAttention]:
        """Every attention with its head labels, in the order of the layers."""
        return self.facts.attentions

    def tokens(self, layer: str | int) -> tuple[list[str], list[str]]:
        """The labels of the queries and the keys of an attention."""
        place = place_of(f"{f'layers.{layer}' if str(layer).isdecimal() else layer}.weights")
        if place is None:
            known = ", ".join(attention.name for attention in self.attentions[:12])
            raise InvalidRequest.at("layer", f"the recording has no {layer!r}; it has {known}")
        return self.facts.tokens[place.stack], self.facts.tokens[place.key_stack]

    def read(
        self,
        layer: str | int | None = None,
        tensor: str | None = None,
        *,
        heads: Indices | None = None,
        queries: Indices | None = None,
        keys: Indices | None = None,
        pool: int | None = None,
    ) -> Array:
        """Read a tensor or a part of it, as ``GET /v1/recordings/{id}`` does. Of a mapped file, nothing else is read.

        ``tensor`` is a tap or ``hidden``, by default ``weights``; without a layer, a full name. The dimensions stay:
        one head gives ``[1, Lq, Lk]``. ``pool`` gives the largest of each square of so many of these queries and keys.
        Raises InvalidRequest for a tensor or an index that is not there.
        """
        query = query_of(layer, tensor, heads, queries, keys, pool)
        name = query.tensor_name()
        if name is None or name not in self.tensors:
            known = ", ".join(list(self.tensors)[:12])
            raise InvalidRequest.at("tensor", f"the recording has no {name!r}; it has {known}")
        if isinstance(self.tensors, MappedTensors):
            return query.read(self.tensors.part(name), name, self.tensors.shape(name))
        return query.read(self.tensors[name], name, self.tensors[name].shape)

    def weights(self, layer: str | int) -> Array:
        """The weights of an attention, ``[H, Lq, Lk]``."""
        return self.read(layer)

    def hidden(self, layer: str | int) -> Array:
        """The hidden states after a layer, ``[Lq, d_model]``, before the final norm.

        ``read(tensor="layers.final")`` are those after the norm.
        """
        return self.read(layer, "hidden")

    def entropy(self, layer: str | int) -> Array:
        """−Σ p ln p of each head in nats, ``[H]``: the mean over the queries that attend to anything."""
        weights = self.weights(layer).astype(np.float64)
        total = weights.sum(-1, keepdims=True)
        shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
        rows, counted = -(shares * logs).sum(-1), total[..., 0] > 0
        count = counted.sum(-1)
        means: Array = np.divide(rows.sum(-1), count, out=np.full(len(rows), np.nan), where=count > 0)
        return means

    def top_keys(self, layer: str | int, head: int, query: int, k: int = 3) -> list[tuple[str, float]]:
        """The most attended keys of one query with their weights, the largest first."""
        row = self.read(layer, heads=head, queries=query)[0, 0].astype(np.float64)
        labels = self.tokens(layer)[1]
        order = np.argsort(-row, kind="stable")[:k]
        return [(labels[key], float(row[key])) for key in order if row[key] > 0]

    # ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def __repr__(self) -> str:
        facts = self.facts
        sizes = " + ".join(f"{len(labels)} tokens" for labels in facts.tokens.values())
        return f"<Recording of {facts.model}: {sizes}, {len(facts.attentions)} attentions, {len(self.tensors)} tensors>"

    def _repr_html_(self) -> str:
        """The heat maps that a notebook shows."""

        def weights_of(name: str) -> Array | None:
            return self.weights(name) if f"{name}.weights" in self.tensors else None

        return recording_html.render(self.facts, self.tokens, weights_of)

    def figure(self, layer: str | int, head: int | None = None) -> "Figure":
        """The weights of an attention, or of one head of it, as a figure of matplotlib (extra ``plot``).

        Raises InvalidRequest for a layer that is not there.
        """
        from attention_pictures import figure_style, heat_maps  # noqa: PLC0415 - where the extra is installed

        name = layer if isinstance(layer, str) and not layer.isdecimal() else f"layers.{layer}"
        attention = self.facts.attention(name)
        if attention is None:
            raise InvalidRequest.at("layer", f"the recording has no attention {name!r}")
        queries, keys = self.tokens(layer)
        titles = attention.heads if head is None else [attention.heads[head]]
        weights = self.read(layer, heads=head).astype(np.float32)
        heading, options = f"{self.facts.model} · {name}", PictureOptions()
        with figure_style.styled(options.theme):
            return heat_maps.heat_maps(weights, titles, heading, options, keys=keys, queries=queries)


def file_of(facts: Mapping[str, Any], tensors: Mapping[str, Array]) -> RecordingFile:
    """The contract's model of these facts and of tensors by their full names."""
    stacks: dict[str, dict[str, Array]] = {}
    for name, array in tensors.items():
        stack, _, rest = name.partition(".")
        stacks.setdefault(stack, {})[rest] = array
    return validate(RecordingFile, {**facts, **stacks})


def query_of(
    layer: str | int | None,
    tensor: str | None,
    heads: Indices | None,
    queries: Indices | None,
    keys: Indices | None,
    pool: int | None = None,
) -> RecordingQuery:
    """The query for a part of a recording. Raises InvalidRequest for indices that cannot be read."""
    chosen = {"heads": _text(heads), "queries": _text(queries), "keys": _text(keys)}
    given = {"layer": None if layer is None else str(layer), "tensor": tensor, "pool": pool} | chosen
    return validate(RecordingQuery, {name: value for name, value in given.items() if value is not None})


def _text(indices: Indices | None) -> str | None:
    if indices is None or isinstance(indices, str):
        return indices
    if isinstance(indices, slice):
        if indices.step not in {None, 1}:
            raise InvalidRequest(f"a slice with step {indices.step}; expected start:stop, or a list of indices")
        return f"{'' if indices.start is None else indices.start}:{'' if indices.stop is None else indices.stop}"
    listed: Iterable[Any] = indices if isinstance(indices, Sequence | np.ndarray) else [indices]
    return ",".join(str(int(index)) for index in listed)
