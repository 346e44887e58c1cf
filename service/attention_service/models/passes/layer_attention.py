"""The attention of every layer of a model, computed by this package's core.

transformers calls ``LayerAttention`` wherever a layer attends. A pass (``AttentionPass``) holds what is asked of the
layers. Their outputs come from the kernel that the planner would choose, whatever is asked beside them, unless many
weights are all computed anyway.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.attention import attend, trace
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import AXES, BoundEdit, apply
from attention_service.core.kernels import KERNELS, Kernel, Needs
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.problem import Problem
from attention_service.models.passes.attention_pass import (
    NOTHING,
    AttentionPass,
    Inspected,
    LayerTask,
    bound_edits,
    bound_to,
    problem_of,
)
from attention_service.models.passes.device_heads import DeviceHeads
from attention_service.models.passes.growing_rotations import GrowingRotations
from attention_service.models.passes.joined_calls import JoinedCalls
from attention_service.models.passes.module_taps import (
    CHOSEN,
    MODULE_TAPS,
    NOTHING_BESIDE,
    ModuleRuns,
    ModuleTaps,
    dense_keys,
    seen_keys,
)
from attention_service.models.passes.ways import AttentionWay, LayerTurns
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.compute import tap_results
from attention_service.runtime.planning.kernel_choice import able_kernels, choose_kernel, least_bytes
from attention_transformers.function_calls import RawAttentionInputs, attention_call
from attention_transformers.model_layers import AttentionModule, LayerKey
from attention_transformers.model_masks import MASK_FUNCTION
from attention_transformers.registration import forget_function, register_function

KERNEL_BYTES: Final = 2**30
"""Bytes that one attention may hold before a kernel is taken that needs less."""


class LayerAttention(AttentionWay):
    """The attention function of one model.

    ``running`` sets the pass that its calls belong to. Without one, calls compute outputs alone.
    """

    way = "computed"

    def __init__(
        self, modules: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]], device: Device,
        share: DeviceHeads | None = None,
    ) -> None:  # fmt: skip
        """``modules``: each with the keys of its layers, in the order in which they run.

        ``share``: the heads that this process has, if the model is spread over several devices.
        """
        self.share = share
        self._eager = False
        """True if all queries see all keys where there is no mask, as to eager attention, whatever the module says."""
        self.name_layers(modules)
        self.calls = JoinedCalls()
        self._device = device
        self._kernels: dict[Hashable, tuple[object, str, Kernel]] = {}
        self._pass: AttentionPass | None = None
        self._replaced_in: PreTrainedModel | None = None
        """The model, while it attends by another function."""
        self._replaced_by = ""
        """The name of that function."""
        self.name = self._packed_name = ""
        """The names of the implementation, once it is installed: of most modules, and of those of packed sequences."""
        self._packed: list[nn.Module] = []

    def name_layers(self, modules: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]]) -> None:
        """Give the layers of each module these keys."""
        self.turns = LayerTurns(modules)
        self.beside = ModuleRuns({one.module: keys for one, keys in modules})
        """The taps that the modules make beside their softmax."""

    def install(self, model: PreTrainedModel, modules: Sequence[AttentionModule]) -> None:
        """Make this the attention of the model. Raises InvalidCheckpoint for one that keeps another."""
        # A model that knows eager attention alone may read its masks: it gets them whole.
        self.name = register_function(self, MASK_FUNCTION if model._supports_sdpa else eager_mask)
        self._packed = [one.module for one in modules if "cu_seqlens" in signature(type(one.module).forward).parameters]
        self._packed_name = register_function(self, MASK_FUNCTION, "flash") if self._packed else self.name
        self.use(model)
        names = {self.name, self._packed_name}
        kept = sorted({type(one.module).__name__ for one in modules if one.implementation not in names})
        if kept:
            raise InvalidCheckpoint.at(
                "checkpoint", f"{type(model).__name__} does not let the attention of {', '.join(kept)} be changed"
            )
        self._eager = not model._supports_sdpa
        self.rotations = GrowingRotations(model)

    def give_way(self, model: PreTrainedModel, name: str) -> None:
        """Let the model attend by another function, until the next pass of this one."""
        if self._replaced_by != name:
            self._replaced_in, self._replaced_by = model, name
            model.set_attn_implementation(name)

    def use(self, model: PreTrainedModel) -> None:
        """Let the model attend by this function, after it attended by another."""
        self._replaced_in, self._replaced_by = None, ""
        model.set_attn_implementation(self.name)
        for module in self._packed:  # of images, all of which are one sequence
            config: Any = module.config
            config._attn_implementation = self._packed_name

    def remove(self) -> None:
        """Forget the function; the model cannot run any more."""
        for name in {self.name, self._packed_name}:
            forget_function(name)

    @contextmanager
    def running(self, attention_pass: AttentionPass) -> Iterator[AttentionPass]:
        """Let the calls until the block ends belong to a pass."""
        if self._replaced_in is not None:
            self.use(self._replaced_in)
        self._pass = attention_pass
        self.restart()
        try:
            with ExitStack() as watched:
                if self.beside.taps:
                    watched.enter_context(self.beside.watching(attention_pass.of_modules, self._see))
                if self.calls.active:
                    watched.enter_context(self.calls.collecting())
                yield attention_pass
        finally:
            self._pass = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers asks. Returns the output ``[B, Lq, H, Dv]``."""
        checkpoint()
        if self._eager:
            options["is_causal"] = False
        if not self.calls.active:
            return self._output(module, query, key, value, attention_mask, options), None

        def attend(values: Tensor) -> Tensor:
            return self._output(module, query, key, values, attention_mask, options)

        return self.calls.output(module, query, key, value, attend), None

    def _output(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """The output ``[B, Lq, H, Dv]`` of an attention."""
        layer, attention_pass = self.turns.layer_of(module), self._pass
        call = attention_call(module, query, key, value, mask, **options)
        raw = call.raw(whole=attention_pass is not None)  # its labels name the last keys too, which no query may see
        share: DeviceHeads | None = None
        whole: DeviceHeads | None = None
        if self.share is not None and attention_pass is not None and attention_pass.concerns(layer):
            share = self.share_of(module, raw.query.shape[1])
            if share is not None and attention_pass.sees_all_heads:
                raw, whole, share = share.whole_attention(raw), share, None
        if attention_pass is not None:
            attention_pass.saw(layer, raw, options.get("sliding_window"))
        context = self._context(module, layer, raw, attention_pass, share)
        for own in () if attention_pass is None else attention_pass.own:
            if own.attention_pass.edits(layer):
                inside = own.inside(raw)
                context[own.rows, :, own.tokens] = self._context(module, layer, inside, own.attention_pass, share)
        if whole is not None:
            context = whole.own(context)
        output = context.transpose(1, 2).contiguous()
        if self.beside.running:
            self.beside.attended(module, layer, output)
        return output

    def share_of(self, module: nn.Module, heads: int) -> DeviceHeads | None:
        """The part of all heads that a call with so many has; None if it has all."""
        return None if self.share is None or not self.share.divides(module, heads) else self.share

    def taps_of(self, _: nn.Module) -> frozenset[str] | None:
        """The taps of an attention that can be asked for: None for all."""
        return None

    def taps_beside(self, module: nn.Module) -> ModuleTaps:
        """The taps that a module makes beside its softmax."""
        return self.beside.taps.get(module, NOTHING_BESIDE)

    def calls_of(self, module: nn.Module) -> int:
        """The calls of a module that are one attention over values side by side."""
        return self.calls.count(module)

    @contextmanager
    def trying(self) -> Iterator[list[nn.Module]]:
        """Find what the modules do beside one call of this function, in passes until the block ends.

        Yields the modules of the calls of the last pass, in their order.
        """
        with self.beside.trying(), self.calls.counting(), self.turns.noting() as called:
            yield called

    def _see(self, layer: LayerKey, tap: str, x: Tensor) -> Tensor:
        """Answer for a tap that a module makes. Returns that to go on with."""
        if self._pass is None:
            return x
        task, share = self._pass.task(layer), None
        if self.share is not None and "heads" in AXES[tap]:
            share = self.share_of(self.turns.module_of(layer), x.shape[1])
            x = x if share is None else share.whole(x)
        x = apply(bound_edits(task, x, {tap}), tap, x)
        if tap in task.traced:
            kept = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            self._pass.traced.setdefault(layer, {})[tap] = kept
            x = kept
        if tap in task.taps:
            self._pass.add_tap(layer, tap, x.detach())
        return x if share is None else share.own(x)

    def _context(
        self, module: nn.Module, layer: LayerKey, raw: RawAttentionInputs, attention_pass: AttentionPass | None,
        share: DeviceHeads | None,
    ) -> Tensor:  # fmt: skip
        """The context ``[B, H, Lq, Dv]``, after what is asked was added to the pass.

        ``share``: given if these are the heads of this device, each of which answers for its own.
        """
        task = NOTHING if attention_pass is None else attention_pass.task(layer)
        if share is not None and attention_pass is not None:
            task = attention_pass.own_task(layer, share, raw.query.shape[1])
        real = task.key_mask
        if real is not None and raw.key_mask is None and real.shape[1] == raw.key.shape[2]:  # an eager mask tells none
            raw.key_mask = real
        edits = bound_edits(task, raw.query, kv_heads=raw.key.shape[1]) if task.edits or task.put else ()
        name, kernel = self.kernel(raw, edits=bool(edits))
        problem = problem_of(raw)
        if attention_pass is None:
            return attend(problem, (), EVERYTHING, edits, kernel).context
        beside = self.beside.taps.get(module)
        chooses = beside is not None and CHOSEN in beside.names
        if CHOSEN in task.taps or (chooses and task.weights is not None and task.weights.return_weights):
            attention_pass.add_tap(layer, CHOSEN, seen_keys(problem))
        inspected = None
        if task.weights is not None:
            chooses = chooses and task.chosen_share
            dense = dense_keys(problem, task.query_mask, self.beside.scores) if chooses else None
            inspected = Inspected(layer, raw, task, dense)
        if inspected is not None and not edits and inspected.gives_context:
            return attention_pass.context(inspected)
        attention_pass.kernels[name] = None
        if task.traced:
            attention_pass.problems[layer] = problem
            return _traced(problem, task, edits, kernel, attention_pass.traced.setdefault(layer, {}))
        if task.whole:
            attended = attend(problem, task.whole, EVERYTHING, edits, kernel)
            attention_pass.add(
                layer, {"whole": {name: x if task.batched else x[0] for name, x in attended.taps.items()}}
            )
        taps = [tap for tap in task.taps if tap not in MODULE_TAPS]
        if taps or not task.whole:
            attended = attend(problem, taps, task.selection, edits, kernel)
        if taps:
            bound = bound_to(raw, batched=task.batched)
            attention_pass.add(layer, tap_results(bound, attended.taps, average_heads=task.average_heads))
        if inspected is not None:
            attention_pass.inspect(inspected)
        return attended.context

    def kernel(self, raw: RawAttentionInputs, *, edits: bool) -> tuple[str, Kernel]:
        """The kernel that computes the output: the fastest by a roofline that needs little enough memory."""
        backward = torch.is_grad_enabled() and raw.query.requires_grad
        batch, heads, queries, width = raw.query.shape
        keys = raw.key.shape[2]
        key = (
            id(raw.spec), raw.mask is None, raw.key_mask is None, edits, backward, raw.query.dtype,
            batch, heads, raw.key.shape[1], width, queries.bit_length(), keys.bit_length(), queries == keys,
        )  # fmt: skip
        known = self._kernels.get(key)
        if known is None:
            bound = bound_to(raw, batched=True)
            able = able_kernels(bound, self._device, None, Needs(edits=edits))
            clock = self._device.clock
            name = choose_kernel(
                bound, able, clock, KERNEL_BYTES, lambda kernel: least_bytes(bound, kernel), backward=backward
            )
            if len(self._kernels) >= 4096:
                self._kernels.clear()
            known = self._kernels[key] = (raw.spec, name, KERNELS[name].make())  # the spec keeps its id
        return known[1], known[2]


def _traced(
    problem: Problem, task: LayerTask, edits: Sequence[BoundEdit], kernel: Kernel, traces: dict[str, Tensor]
) -> Tensor:
    """The context, on the graph of its inputs and of the taps that are kept."""
    q, k, v = (
        x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
    )
    problem = replace(problem, q=q, k=k, v=v)
    traced = set(task.traced) - MODULE_TAPS
    if edits or not traced <= {"q", "k", "v", "context"}:
        taps = trace(problem, edits)
    else:
        taps = {"q": q, "k": k, "v": v, "context": attend(problem, (), EVERYTHING, (), kernel).context}
    traces.update({tap: taps[tap] for tap in traced})
    return taps["context"]
