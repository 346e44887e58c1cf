"""One run of a model: what it is to find at each attention, and what was found.

Statistics, weights, taps and edits are the operations of modules. The inspections of small attentions that are alike
are one batch.
"""

import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_contract.schemas.attention import Edit
from attention_contract.schemas.weights import WeightsRequest
from attention_service.core.blocks import SCORES_AT_ONCE, scores_at_once
from attention_service.core.edits import AXES, BoundEdit
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.problem import Problem, Selection, Widths
from attention_service.core.tensors import pick, torch_dtype_name
from attention_service.models.passes.device_heads import HEADS, DeviceHeads, DividedHeads
from attention_service.models.passes.module_taps import CHOSEN_SHARE, GATE, INDEX_SCORES, MODULE_TAPS, chosen_share
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.bound_statistics import BoundStatistics
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.weights import Inspection
from attention_service.runtime.planning.blank_requests import raw_request
from attention_service.runtime.planning.request_sizes import RequestSizes
from attention_service.runtime.scheduling.operation import Fields, Results, Uploaded, on_host
from attention_transformers.function_calls import RawAttentionInputs
from attention_transformers.model_layers import LayerKey

_MANY_SCORES: Final = 2**18
"""Scores of an attention, on a CPU, whose fused kernel takes longer than an inspection of its own does besides."""
STATE_TAPS: Final = frozenset({"output", "mlp", "router", "hidden", "embeddings"})
"""The taps that are states between modules, edited behind the module that makes them (``points``)."""


@dataclass(frozen=True, eq=False)
class LayerTask:
    """The work of a pass at one attention: taps, statistics, edits."""

    batched: bool = True
    """False if its results have no batch dimension."""
    edits: Sequence[Edit] = ()
    selection: Selection = EVERYTHING
    keys: Sequence[int] | None = None
    """The keys of the weights of an inspection; None for all."""
    taps: Sequence[str] = ()
    """The taps to return, narrowed by the selection."""
    average_heads: bool = False
    whole: Sequence[str] = ()
    """Taps for the recording, not narrowed by the selection."""
    weights: WeightsRequest | None = None
    """The inspection to make."""
    before: Problem | None = None
    """The attention of the run without edits that the inspection compares with, if any layer has edits."""
    statistics: BoundStatistics = field(default_factory=BoundStatistics)
    chosen_share: bool = False
    """True to add the statistic ``chosen_share``: NaN for an attention that chooses no keys."""
    key_mask: Tensor | None = None
    """Bool ``[B, Lk]``, True for a key that is no padding, which edits do not touch; None if none is."""
    query_mask: Tensor | None = None
    """``[B, Lq]``, True for a real query; None if all are."""
    traced: Sequence[str] = ()
    """The taps to keep with their gradients' graph."""
    put: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors to put in the place of whole taps, after the edits."""
    divided: DividedHeads | None = None
    """The heads of this device, of a task that is for these alone."""

    @property
    def asks(self) -> bool:
        """True if anything is asked or changed."""
        return bool(self.edits or self.taps or self.whole or self.weights or self.traced or self.put)

    @property
    def of_module(self) -> set[str]:
        """The taps that the attention's module is to make for it."""
        named = {*self.taps, *self.traced, *self.put, *(edit.tap for edit in self.edits)}
        return (named & {GATE, INDEX_SCORES}) | ({INDEX_SCORES} if self.chosen_share else set())


NOTHING: Final = LayerTask()


class OwnTexts(NamedTuple):
    """Texts of a pass with tasks of their own: those of one of the requests that share it."""

    rows: slice
    tokens: slice
    """Their tokens among those of the longest text."""
    attention_pass: "AttentionPass"
    """The tasks at their layers, as if they ran by themselves."""

    @property
    def are_all(self) -> bool:
        """True for all texts of a pass, with their padding."""
        return (self.rows, self.tokens) == (slice(None), slice(None))

    def inside(self, raw: RawAttentionInputs) -> RawAttentionInputs:
        """The attention of these texts alone."""
        rows, tokens, mask = self.rows, self.tokens, raw.mask
        if mask is not None:
            mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)
            own = [slice(None) if size == 1 else part for size, part in zip(mask.shape, self._parts, strict=True)]
            mask = mask[tuple(own)]
        query, key, value = (x[rows, :, tokens] for x in (raw.query, raw.key, raw.value))
        key_mask = None if raw.key_mask is None else raw.key_mask[rows, tokens]
        return replace(raw, query=query, key=key, value=value, mask=mask, key_mask=key_mask)

    @property
    def _parts(self) -> tuple[slice, slice, slice, slice]:
        return self.rows, slice(None), self.tokens, self.tokens


class AttentionPass:
    """One run of a model, or several: what is asked of its layers, and what was found."""

    sees_all_heads = False
    """True if ``saw`` takes the heads of all devices."""

    def __init__(self, tasks: Mapping[LayerKey, LayerTask], own: Sequence[OwnTexts] = ()) -> None:
        """``own``: the texts of requests with edits, in a pass that several share."""
        self.tasks = tasks
        self.own = own
        self.started = time.perf_counter()
        """When the work of its run began."""
        self.kernels: dict[str, None] = {}
        """The names of the kernels that computed the outputs, in their order."""
        self.traced: dict[LayerKey, dict[str, Tensor]] = {}
        """The taps of ``LayerTask.traced`` by layer, on the device."""
        self.problems: dict[LayerKey, Problem] = {}
        """The attentions of those layers."""
        self._results: dict[LayerKey, Fields] = {}
        self._divided: dict[LayerKey, DividedHeads] = {}
        """The layers of whose results each device has those of its own heads."""
        self._waiting: dict[Hashable, list[Inspected]] = {}

    def take(self) -> dict[LayerKey, Fields]:
        """Return the results of each layer since the last call, on the host."""
        for alike in self._waiting.values():
            self._inspect(alike)
        self._waiting.clear()
        results, self._results = self._results, {}
        for layer in sorted(results.keys() & self._divided.keys(), key=str):  # in all processes alike
            results[layer] = self._divided[layer].of_all(results[layer])
        return results

    @property
    def of_modules(self) -> set[tuple[LayerKey, str]]:
        """The taps that the modules of layers are to make."""
        return {(layer, tap) for layer, task in self.tasks.items() for tap in task.of_module}

    @property
    def texts(self) -> list[OwnTexts]:
        """All texts, and those of each request with edits."""
        return [OwnTexts(slice(None), slice(None), self), *self.own]

    def add_tasks(
        self, keep: Iterable[tuple[LayerKey | None, str]], put: Mapping[tuple[LayerKey | None, str], Tensor]
    ) -> None:
        """Keep these taps with their graph, and put tensors in the place of others, beside the tasks that there are."""
        tasks, kept, values = {**self.tasks}, dict[LayerKey, list[str]](), dict[LayerKey, dict[str, Tensor]]()
        for layer, tap in keep:
            if layer is not None:
                kept.setdefault(layer, []).append(tap)
        for (layer, tap), value in put.items():
            if layer is not None:
                values.setdefault(layer, {})[tap] = value
        for layer in {**kept, **values}:
            task = tasks.get(layer, NOTHING)
            traced = (*task.traced, *kept.get(layer, ()))
            tasks[layer] = replace(task, traced=traced, put={**task.put, **values.get(layer, {})})
        self.tasks = tasks

    def check_rows_shared(self, layers: Iterable[LayerKey]) -> None:
        """Raise TypeError if texts of the pass have tasks of their own at layers that answer for all texts alike."""
        for layer in layers:
            if any(texts.attention_pass.task(layer).asks for texts in self.own):
                raise TypeError(f"layer {layer} cannot answer for some texts of a pass by themselves")

    def task(self, layer: LayerKey) -> LayerTask:
        """Return the task at a layer."""
        return self.tasks.get(layer, NOTHING)

    def own_task(self, layer: LayerKey, share: DeviceHeads, heads: int) -> LayerTask:
        """Return the task at a layer for the heads of this device, which has so many; ``take`` has those of all."""
        task = self.task(layer)
        averaged = task.average_heads or (task.weights is not None and bool(task.weights.average_heads))
        chosen, dim = task.selection.heads, HEADS if task.batched else HEADS - 1
        divided = self._divided[layer] = DividedHeads(share, heads, chosen, dim, averaged)
        return replace(task, divided=divided, selection=replace(task.selection, heads=divided.own))

    def divided(self, layer: LayerKey, chosen: Sequence[int] | None, *, batched: bool) -> DividedHeads | None:
        """Return these heads of a layer of which this device has its own alone; None if it has all."""
        divided = self._divided.get(layer)
        return None if divided is None else divided._replace(chosen=chosen, dim=HEADS if batched else HEADS - 1)

    def of_all_heads(self, layer: LayerKey | None, x: Tensor, dim: int = HEADS) -> Tensor:
        """Return a result of a layer with the heads of all devices."""
        divided = None if layer is None else self._divided.get(layer)
        return x if divided is None else divided.share.whole(x, dim)

    def concerns(self, layer: LayerKey) -> bool:
        """Return True if anything is asked or changed at a layer, or its inputs are noted."""
        if self.task(layer).asks or self.notes(layer):
            return True
        return any(own.attention_pass.edits(layer) for own in self.own)

    def edits(self, layer: LayerKey) -> bool:
        """Return True if edits change the attention of a layer; those of states come after it."""
        task = self.task(layer)
        return bool(task.put) or any(edit.tap not in STATE_TAPS for edit in task.edits)

    def add_tap(self, layer: LayerKey, tap: str, x: Tensor) -> None:
        """Add a tap that no attention function makes, narrowed by the selection."""
        task = self.task(layer)
        chosen = {"heads": task.selection.heads, "queries": task.selection.queries, "keys": task.keys}
        for axis, index in chosen.items():
            if index is not None and axis in AXES[tap]:
                x = pick(x, AXES[tap][axis], index)
        self.add(layer, {tap: x if task.batched else x[0]})

    def add(self, layer: LayerKey, results: Results) -> None:
        """Copy results of a layer to the host."""
        self._results.setdefault(layer, {}).update(on_host(results))

    def notes(self, layer: LayerKey) -> bool:
        """True if ``saw`` notes the inputs of a layer."""
        return False

    def saw(self, layer: LayerKey, raw: RawAttentionInputs, window: int | None) -> None:
        """Take the inputs of a layer. Subclasses record them; this class does nothing.

        ``window``: the tokens of the layer's sliding window, in a text of any length.
        """

    def context(self, inspected: "Inspected") -> Tensor:
        """Inspect the weights of a layer, and return the context ``[B, H, Lq, Dv]`` that they give."""
        self.kernels[MATERIALIZED] = None
        results: Results = self._inspect([inspected], with_context=True)
        context: Tensor = results["context"]
        return context

    def inspect(self, waiting: "Inspected") -> None:
        """Inspect the weights of a layer, together with those of others like it if they are few."""
        group = waiting.group
        alike = self._waiting.setdefault(group, [])
        alike.append(waiting)
        if group is None or len(alike) * waiting.scores >= scores_at_once(gpu=waiting.raw.query.is_cuda):
            self._inspect(self._waiting.pop(group))

    def _inspect(self, alike: "Sequence[Inspected]", *, with_context: bool = False) -> Results:
        """Inspect attentions that are alike, as one batch. Returns the ``context``, if it is wanted."""
        first = alike[0]
        raw, task, batch = first.raw, first.task, first.raw.query.shape[0]
        if task.weights is None:
            raise TypeError("a layer that is inspected was asked for its weights")
        many, statistics = len(alike), task.statistics
        bound = bound_to(raw, batched=True, layers=many)
        device, dtype = raw.query.device, raw.query.dtype
        bound_whole = compute.bind_edits(task.edits, device, dtype, real_keys=True) if task.edits else ()
        edits = _of_own_heads(task, bound_whole, raw.key.shape[1])
        operation = Inspection(
            bound, task.weights, task.selection, statistics.repeated(many), task.keys, task.before, with_context
        )
        tensors = first.tensors(alike)
        parameters = {} if raw.sinks is None else {"sinks": raw.sinks}
        results = operation.launch(Uploaded(tensors, parameters, edits))
        beside = {"context": results.pop("context")} if with_context else {}
        fields = operation.collect(results)
        if task.chosen_share:
            fields["statistics"][CHOSEN_SHARE] = self._chosen_share(first, edits)
        for index, call in enumerate(alike):
            place = slice(index * batch, (index + 1) * batch) if task.batched else index
            self._results.setdefault(call.layer, {}).update(_at(fields, place))
        return beside

    def _chosen_share(self, inspected: "Inspected", edits: Sequence[BoundEdit]) -> Any:
        """The statistic ``[B, H]`` of one attention; NaN if it chooses no keys."""
        raw, dense = inspected.raw, inspected.dense
        if dense is None:
            return np.full(raw.query.shape[:2], np.nan, np.float32)
        real = inspected.task.query_mask
        share = chosen_share(problem_of(raw), dense, None if real is None else real.to(dense.device), edits)
        return on_host({"": share.to(raw.query.dtype)})[""]


class KeptAttentions(AttentionPass):
    """A pass that keeps the attentions of some layers in ``problems``."""

    def __init__(self, layers: Collection[LayerKey]) -> None:
        super().__init__({})
        self._layers = layers

    def notes(self, layer: LayerKey) -> bool:
        """True for the layers to keep."""
        return layer in self._layers

    def saw(self, layer: LayerKey, raw: RawAttentionInputs, window: int | None) -> None:
        """Keep the inputs of a layer."""
        if layer in self._layers:
            self.problems[layer] = problem_of(raw)


def _at(fields: Fields, place: Any) -> Fields:
    """Return the part of each array that belongs to one of several stacked layers."""
    return {
        name: _at(value, place) if isinstance(value, dict) else np.asarray(value[place])
        for name, value in fields.items()
    }


@dataclass(eq=False, slots=True)
class Inspected:
    """An attention whose weights are to be inspected."""

    layer: LayerKey
    raw: RawAttentionInputs
    task: LayerTask
    dense: Tensor | None = None
    """Bool ``[B, 1, Lq, Lk]``: the keys that a query could choose; None if there is no choice, or it is not asked."""

    @property
    def group(self) -> Hashable:
        """Equal for attentions that may be inspected as one batch; None for one that is alone."""
        raw, task = self.raw, self.task
        if task.edits or task.before is not None or raw.sinks is not None or self.dense is not None:
            return None
        shapes = (raw.query.shape, raw.key.shape, raw.value.shape, None if raw.mask is None else raw.mask.shape)
        objects = (id(raw.spec), id(raw.key_mask), raw.offset, id(task.weights), task.selection, task.keys)
        return (*shapes, *objects, id(task.statistics), id(task.query_mask))

    @property
    def gives_context(self) -> bool:
        """True if all weights are computed anyway and are so many that a second kernel call costs more.

        Of half types a fused kernel keeps weights of more digits.
        """
        task = self.task
        if task.weights is None or task.whole or task.taps or task.traced or task.statistics.corrected:
            return False
        many = SCORES_AT_ONCE if self.raw.query.is_cuda else _MANY_SCORES
        return self.raw.query.dtype.itemsize > 2 and self.scores >= many

    @property
    def scores(self) -> int:
        """Number of its scores."""
        batch, heads, queries, _ = self.raw.query.shape
        return batch * heads * queries * self.raw.key.shape[2]

    def tensors(self, alike: "Sequence[Inspected]") -> dict[str, Tensor]:
        """The tensors of all of them, one behind the other along the batch."""
        raws, many = [call.raw for call in alike], len(alike)
        tensors = {
            "query": _stacked([raw.query for raw in raws]),
            "key": _stacked([raw.key for raw in raws]),
            "value": _stacked([raw.value for raw in raws]),
        }
        if self.raw.mask is not None:
            batch = self.raw.query.shape[0]
            tensors["mask"] = _stacked([_of_batch(raw.mask, batch) for raw in raws if raw.mask is not None])
        for name, shared in (("key_mask", self.raw.key_mask), ("query_mask", self.task.query_mask)):
            if shared is not None:
                tensors[name] = shared.repeat(many, 1)
        if self.raw.weights is not None:
            tensors["weights"] = _stacked([raw.weights for raw in raws if raw.weights is not None])
        if self.raw.offset:
            tensors["offsets"] = torch.tensor(self.raw.offset)
        return tensors


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _of_batch(mask: Tensor, batch: int) -> Tensor:
    """Return a mask of rank 4 for each sequence of the batch."""
    mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)
    return mask.expand(batch, *mask.shape[1:])


def widths_of(raw: RawAttentionInputs) -> Widths:
    """Return the heads of an attention, and their widths."""
    _, heads, _, head_dim = raw.query.shape
    return Widths(heads, raw.key.shape[1], head_dim, raw.value.shape[3])


def bound_to(raw: RawAttentionInputs, *, batched: bool, layers: int = 1) -> BoundRequest:
    """Return the attention as a bound request without numbers; of several layers as one batch."""
    shape: tuple[int, ...] = ()
    mask_dtype: type | None = None
    if raw.mask is not None:
        shape = (1,) * (4 - raw.mask.ndim) + tuple(raw.mask.shape)
        mask_dtype = bool if raw.mask.dtype == torch.bool else float
    sizes = RequestSizes(layers * raw.query.shape[0], raw.query.shape[2], raw.key.shape[2], mask=shape)
    dtype = torch_dtype_name(raw.query.dtype)
    return raw_request(raw.spec, widths_of(raw), dtype, sizes, mask_dtype=mask_dtype, batched=batched)


def bound_edits(
    task: LayerTask, like: Tensor, of: Collection[str] | None = None, kv_heads: int = 1
) -> Sequence[BoundEdit]:
    """The edits of a layer on the device, of the taps that its attention function makes, or of these.

    States are edited behind the modules that make them (``points``). ``kv_heads``: those of its keys and values here.
    """

    def concerns(tap: str) -> bool:
        return tap not in MODULE_TAPS | STATE_TAPS if of is None else tap in of

    inner = [edit for edit in task.edits if concerns(edit.tap)]
    put = [BoundEdit(tap, value=value) for tap, value in task.put.items() if concerns(tap)]
    edits = [*compute.bind_edits(inner, like.device, like.dtype, real_keys=True), *put]
    return _of_own_heads(task, edits, kv_heads)


def _of_own_heads(task: LayerTask, edits: Sequence[BoundEdit], kv_heads: int) -> Sequence[BoundEdit]:
    """The edits of a layer as they apply to the heads that its task is for."""
    divided = task.divided
    return edits if divided is None else divided.share.own_edits(edits, divided.heads, kv_heads)


def problem_of(raw: RawAttentionInputs) -> Problem:
    """Return the attention as the problem that the core computes."""
    return Problem(
        raw.query, raw.key, raw.value, raw.spec, mask=raw.mask, key_mask=raw.key_mask,
        offsets=torch.tensor(raw.offset) if raw.offset else None,
        learned={} if raw.sinks is None else {"sinks": raw.sinks}, given=raw.weights,
    )  # fmt: skip
