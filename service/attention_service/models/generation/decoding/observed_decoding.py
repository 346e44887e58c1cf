"""Passes that generate of a model that computes its attention itself: weights and edits where they are seen.

Such texts share no pass. Notation as in ``core.problem``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from attention_contract.errors import InvalidRequest
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit, apply
from attention_service.models.generation.decoding.decode_attention import TextRow, editing_states
from attention_service.models.generation.decoding.pasts.joined_past import JoinedPast
from attention_service.models.generation.decoding.token_attention import PassWeights, is_cross
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.observed.observed_attention import ObservedAttention
from attention_service.models.passes.observed.own_functions import Sight, watching


class ObservedDecoding:
    """The attention of one model in the passes that generate."""

    def __init__(self, loaded: LoadedModel, seen: ObservedAttention) -> None:
        self._places, self._points, self._core = loaded.places, loaded.points, seen

    def close(self) -> None:
        """Leave the model as it is."""

    @contextmanager
    def running(
        self, rows: Sequence[TextRow], joined: JoinedPast | None = None, ends: Sequence[int] | None = None
    ) -> Iterator[PassWeights]:
        """Let a pass be over one text, or over any texts of a model without attentions."""
        core, weights = self._core, PassWeights()
        core.restart()
        if not rows:
            yield weights
            return
        if not self._places:
            with editing_states(rows, self._points):
                yield weights
            return
        (row,) = rows

        def begin(module: nn.Module) -> "_Layer":
            return _Layer(core, module, row, weights)

        with editing_states(rows, self._points), watching(core.sights, begin):
            yield weights


class _Layer:
    """One attention in the pass of a text."""

    def __init__(self, core: ObservedAttention, module: nn.Module, row: TextRow, weights: PassWeights) -> None:
        checkpoint()
        self._layer, self._row, self._pass_weights = core.turns.layer_of(module), row, weights
        self._sight: Sight = core.sights[module]
        self._edits: Sequence[BoundEdit] = ()

    def weights(self, x: Tensor) -> Tensor:
        """Edit the weights ``[1, H, Q, K]``, and take those of the last query."""
        row, layer, (queries, keys) = self._row, self._layer, x.shape[2:]
        looks = [look for look in row.looks if look.wants(layer)]
        tokens = row.seen + queries
        if (looks or row.edits) and not (self._sight.is_over_pairs(x) and (is_cross(layer) or keys <= len(row.ids))):
            raise InvalidRequest.at(
                "attention",
                f"layer {layer} has other keys than the {tokens} tokens when it generates; leave attention out, and "
                "ask for the weights of the whole text (/v1/models/{model}/weights)",
            )
        if row.edits:
            first = 0 if is_cross(layer) else tokens - keys
            heads = self._sight.heads, self._sight.kv_heads
            self._edits = row.edits.inside(
                layer, range(row.seen, row.seen + queries), heads, range(first, first + keys)
            )
            x = apply(self._edits, "weights", x)
        for look in looks:
            self._pass_weights.add(layer, [look], x[:, :, -1:])
        return x

    def values(self, x: Tensor) -> Tensor:
        """Edit the values ``[1, Hkv, K, V]``."""
        return apply(self._edits, "v", x)

    def context(self, x: Tensor) -> Tensor:
        """Edit the context ``[1, H, Q, V]``."""
        return apply(self._edits, "context", x)
