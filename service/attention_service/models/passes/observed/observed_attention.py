"""The attention of every layer of a model that computes it itself, seen and changed while the model runs.

The second way beside ``layer_attention``, of the same interface: a pass states its tasks in the same words.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit, apply
from attention_service.core.stages import narrow
from attention_service.models.passes.attention_pass import (
    NOTHING,
    AttentionPass,
    Inspected,
    bound_edits,
    bound_to,
    problem_of,
)
from attention_service.models.passes.growing_rotations import GrowingRotations
from attention_service.models.passes.observed.own_functions import Sight, watching
from attention_service.models.passes.ways import AttentionWay, LayerTurns
from attention_service.runtime.operations.compute import tap_results
from attention_transformers.function_calls import RawAttentionInputs
from attention_transformers.model_layers import AttentionModule, LayerKey

KERNEL: Final = "eager"
"""The name of what computes the outputs, in ``ran.kernels``."""
_ANY: Final = AttentionSpec()


class ObservedAttention(AttentionWay):
    """The attentions of one model, where they are seen."""

    def __init__(
        self, model: nn.Module, layers: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]],
        sights: Mapping[nn.Module, Sight],
    ) -> None:  # fmt: skip
        """``layers``: each module with the keys of its layers; ``sights``: see ``attention_trial``."""
        self.turns = LayerTurns(layers)
        self._keys = [key for _, keys in layers for key in keys]
        self.sights = {one.module: sights[one.module] for one, _ in layers}
        self.rotations = GrowingRotations(model)

    def taps_of(self, module: nn.Module) -> frozenset[str] | None:
        """The taps of an attention that can be asked for."""
        return frozenset(self.sights[module].taps)

    @contextmanager
    def running(self, attention_pass: AttentionPass) -> Iterator[AttentionPass]:
        """Let the model's runs until the block ends belong to a pass."""
        attention_pass.check_rows_shared(self._keys)
        self.restart()

        def layer(module: nn.Module) -> SeenLayer:
            return SeenLayer(self.turns.layer_of(module), self.sights[module], attention_pass)

        with watching(self.sights, layer):
            yield attention_pass


class SeenLayer:
    """The task of a pass at one attention, in one run of its module."""

    def __init__(self, layer: LayerKey, sight: Sight, attention_pass: AttentionPass) -> None:
        checkpoint()
        self._layer, self._sight, self._pass = layer, sight, attention_pass
        self._task = attention_pass.tasks.get(layer, NOTHING)
        self._edits: Sequence[BoundEdit] = ()
        self._raw: RawAttentionInputs | None = None

    def weights(self, x: Tensor) -> Tensor:
        """Answer for the weights ``[B, H, Q, K]``. Returns those to go on with."""
        attention_pass, task, sight = self._pass, self._task, self._sight
        if not sight.is_over_pairs(x) or (sight.square and x.shape[2] != x.shape[3]):
            if not task.asks:
                return x
            raise InvalidRequest.at(
                "layers",
                f"layer {self._layer} attends over pieces of a text of this length, so that it has no weights over "
                "pairs of tokens; send a shorter text, or leave the layer out",
            )
        keeps = task.asks or attention_pass.notes(self._layer)
        # The model may change its own in place.
        raw = self._begin(x.detach().clone() if keeps else x)
        attention_pass.kernels[KERNEL] = None
        self._edits = bound_edits(task, x) if task.edits or task.put else ()
        if task.weights is not None:
            attention_pass.inspect(Inspected(self._layer, raw, task))
        return self._answered("weights", x)

    @property
    def needs_weights(self) -> bool:
        """True if the pass needs the weights, and not only values or a context."""
        task = self._task
        if task.weights is not None or self._pass.notes(self._layer):
            return True
        return "weights" in {*task.taps, *task.whole, *task.traced, *task.put, *(edit.tap for edit in task.edits)}

    def without_weights(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Begin without weights: returns zeros of this shape that have no memory."""
        blank = like.new_zeros(()).expand(*shape)
        self._begin(blank)
        self._edits = bound_edits(self._task, like) if self._task.edits or self._task.put else ()
        return blank

    def _begin(self, weights: Tensor) -> RawAttentionInputs:
        """Tell the pass of the attention."""
        raw = self._raw = blank_inputs(weights, self._sight)
        real = self._task.key_mask
        raw.key_mask = real if real is not None and real.shape[1] == weights.shape[3] else None
        self._pass.saw(self._layer, raw, None)
        if self._task.traced:
            self._pass.problems[self._layer] = problem_of(raw)
        return raw

    def values(self, x: Tensor) -> Tensor:
        """Answer for the values ``[B, Hkv, K, V]``. Returns those to go on with."""
        return self._answered("v", x)

    def context(self, x: Tensor) -> Tensor:
        """Answer for the context ``[B, H, Q, V]``. Returns that to go on with."""
        return self._answered("context", x)

    def _answered(self, tap: str, x: Tensor) -> Tensor:
        layer, attention_pass, task, raw = self._layer, self._pass, self._task, self._raw
        if raw is None:  # the weights are not over pairs
            return x
        if self._edits:
            real = raw.key_mask if tap == "weights" else None
            x = apply(self._edits, tap, x, None if real is None else real[:, None, None])
        asks = tap in task.whole or tap in task.taps
        if tap in task.traced:
            kept = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            attention_pass.traced.setdefault(layer, {})[tap] = kept
            x = kept.clone()
        kept = x.detach().clone() if asks else x
        if tap in task.whole:
            attention_pass.add(layer, {"whole": {tap: kept if task.batched else kept[0]}})
        if tap in task.taps:
            chosen = {tap: narrow(kept, tap, problem_of(raw), task.selection)}
            bound = bound_to(raw, batched=task.batched)
            attention_pass.add(layer, tap_results(bound, chosen, average_heads=task.average_heads))
        return x


def blank_inputs(weights: Tensor, sight: Sight) -> RawAttentionInputs:
    """An attention whose weights ``[B, H, Q, K]`` are known: its other tensors have sizes and no memory."""
    batch, heads, queries, keys = weights.shape
    zero, width = weights.new_zeros(()), sight.value_dim or 1
    of_keys = zero.expand(batch, sight.kv_heads, keys, width)
    return RawAttentionInputs(
        zero.expand(batch, heads, queries, width), of_keys, of_keys, _ANY, mask=None, key_mask=None,
        offset=0, sinks=None, weights=weights.detach(),
    )  # fmt: skip
