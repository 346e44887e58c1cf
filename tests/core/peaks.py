"""What a pass holds on the CPU, as PyTorch's profiler sees it: requests of workloads, and the peaks of their passes."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attention_service.core.attention import attend, trace
from attention_service.core.learned import learned_of
from attention_service.core.multihead import initial_parameters, project, project_out
from attention_service.core.preparing import prepare
from attention_service.core.types import Dropout, Problem, Selection
from attention_service.cost import Workload

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
Run = Callable[[], object]


def input_shapes(work: Workload) -> dict[str, tuple[int, ...]]:
    """The shapes of a workload's inputs and of its past, by field."""
    sizes = work.sizes
    widths = {"query": work.head_dim, "key": work.head_dim, "value": work.value_dim}
    if sizes is not None:
        widths = {"query": sizes.d_model, "key": sizes.key_width, "value": sizes.value_width}
    shapes = {}
    for name, width in widths.items():
        if name in work.inputs:
            length = work.queries if name == "query" else work.new_keys
            heads = () if sizes is not None else (work.heads if name == "query" else work.kv_heads,)
            shapes[name] = (work.batch, *heads, length, width)
    if work.past:
        for name, width in (("past_key", work.head_dim), ("past_value", work.value_dim)):
            shapes[name] = (work.batch, work.kv_heads, work.past, width)
    return shapes


@dataclass
class Request:
    """A workload's tensors, and the pass over them that a server would make."""

    work: Workload

    def __post_init__(self):
        work, sizes = self.work, self.work.sizes
        dtype = DTYPES[work.itemsize]
        self.tensors = {name: torch.randn(shape).to(dtype) for name, shape in input_shapes(work).items()}
        if work.request_mask_elements:
            shapes = ((work.batch, 1, 1, work.keys), (1, 1, work.queries, work.keys))
            whole = (work.batch, work.heads, work.queries, work.keys)
            fits = [shape for shape in shapes if torch.Size(shape).numel() == work.request_mask_elements]
            mask = torch.randn(fits[0] if fits else whole)
            self.tensors["mask"] = mask > -2 if work.bool_mask else mask.to(dtype)
        if work.padded:
            self.tensors["key_lengths"] = torch.full((work.batch,), work.keys - 1)
        if work.batched_offsets:
            self.tensors["offsets"] = torch.tensor(work.offsets or range(work.batch))
        elif work.batched_places:
            self.tensors["positions"] = torch.arange(work.past, work.past + work.queries).repeat(work.batch, 1)
        self.parameters = {} if sizes is None else initial_parameters(sizes, 0, dtype)
        if sizes is None:
            learned = learned_of(work.spec, work.widths)
            self.tensors |= {
                f"parameters.{name}": torch.ones(each.shape, dtype=dtype) for name, each in learned.items()
            }

    def problem(self, tensors, parameters) -> Problem:
        sizes = self.work.sizes

        def by_head(*three):
            return three if sizes is None else project(parameters, sizes, *three)

        apart = partial(project, parameters, sizes, by="global") if self.work.apart else None
        given = parameters | {name.removeprefix("parameters."): x for name, x in tensors.items()}
        learned = {name: given[name] for name in learned_of(self.work.spec, self.work.widths)}
        problem = prepare(self.work.spec, tensors, learned, by_head, projected=sizes is not None, apart=apart)
        return replace(problem, dropout=Dropout(0.1, 0) if self.work.dropped else None)

    def copied(self):
        """As when they are brought to a device."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    @torch.inference_mode()
    def forward(self, kernel: str, edits=()):
        work = self.work
        problem = self.problem(self.copied(), self.parameters)
        heads, queries = (
            None if count is None else tuple(range(count)) for count in (work.selected_heads, work.selected_queries)
        )
        attended = attend(problem, work.taps - {"output"}, Selection(heads, queries), edits, kernel)
        present = (problem.k, problem.v) if work.past else ()
        del problem
        output = attended.context if work.sizes is None else project_out(self.parameters, attended.context)
        return present, attended.taps, output

    def backward(self, kernel: str, taps=(), *, twice=False, edits=()):
        tensors = self.copied()
        leaves = {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
        parameters = {name: x.detach().requires_grad_() for name, x in self.parameters.items()}
        problem = self.problem(tensors, parameters)
        if taps:
            found = trace(problem, edits)
            context = found["context"]
            at = {tap: found[tap] for tap in taps}
            del found
        else:
            context, at = attend(problem, (), Selection(), edits, kernel).context, {}
        del problem, tensors  # which the graph keeps as far as it needs them
        output = context if self.work.sizes is None else project_out(parameters, context)
        del context
        wanted = [*leaves.values(), *parameters.values(), *at.values()]
        upstream = torch.ones_like(output)
        gradients = torch.autograd.grad(
            output, wanted, upstream, create_graph=twice, materialize_grads=True, allow_unused=True
        )
        if twice:
            along = sum((x * torch.ones_like(x)).sum() for x in gradients)
            return torch.autograd.grad(along, wanted, materialize_grads=True, allow_unused=True), gradients
        return output, wanted, gradients


def peaks(runs: Sequence[Run]) -> list[int]:
    """The most bytes that each run held at a time. One profile of all of them: to start one takes long."""
    with _no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, run in enumerate(runs):
            with record_function(f"run|{number}"):
                run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in allocated]
    found = {}
    for event in events:
        if event.name().startswith("run|"):
            inside = allocated[bisect_left(times, event.start_ns()) : bisect_left(times, event.end_ns())]
            found[int(event.name().split("|")[1])] = max(accumulate(change.nbytes() for change in inside))
    return [found[number] for number in range(len(runs))]


@contextmanager
def _no_collection() -> Iterator[None]:
    """What others left in cycles is given back before: within a run, it would be taken for what the run gave back."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_at_peak(run: Run) -> list[tuple[int, str]]:
    """What one run holds when it holds most: bytes, and the operations in which they were allocated, outermost last."""
    with _no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held: dict[int, tuple[int, str]] = {}
    now = most = 0
    at_peak: list[tuple[int, str]] = []
    for _, pointer, size, name in sorted(_changes(profiler.profiler.kineto_results.experimental_event_tree(), ())):
        now += size
        if size > 0:
            held[pointer] = size, name
        else:
            held.pop(pointer, None)
        if now > most:
            most, at_peak = now, [*held.values()]
    return at_peak


def _changes(events: Sequence[object], within: tuple[str, ...]) -> Iterator[tuple[int, int, int, str]]:
    """When, where and of how many bytes memory was taken or given back."""
    for event in events:
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            yield event.start_time_ns, fields.ptr, fields.alloc_size, " < ".join(reversed(within))
        yield from _changes(event.children, (*within, event.name))
