"""Forward pass of a module by a CUDA graph of its bucket of sizes: the output alone, of self-attention.

A graph has one shape, so sequences and their tokens are padded to the upper end of a bucket, of which there is one an
octave. Tokens that are added come last: a causal mask hides them, and without one the lengths of the keys do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.spec import Causal, Mask, SlidingWindow
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS
from attention_service.core.nonfinite_keys import sum_of
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.frequencies import outgrown_length
from attention_service.core.tensors import TORCH_DTYPES, are_finite, to_device
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.cuda_graphs import CapturedGraph, Recipe, Tensors
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded

SHORTEST: Final = 16
"""Tokens of the smallest bucket."""
MOST_TOKENS: Final = 2048
"""Tokens of all sequences together, padded: beyond, the GPU takes longer than the host's launches."""


class PaddedSizes(NamedTuple):
    """The padded sizes of a pass."""

    batch: int
    length: int

    @classmethod
    def of(cls, batch: int, length: int) -> "PaddedSizes":
        """The next powers of two."""
        return cls(_power(batch), max(_power(length), SHORTEST))


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def takes(bound: BoundRequest, request: ForwardRequest, kernel: str) -> bool:
    """True if a graph gives all that a request asks a module for, whatever tokens are added at the end."""
    if bound.module is None or bound.learned or bound.state_wanted or kernel not in KERNELS:
        return False
    changed = request.edits or request.compare or request.dropout or request.report_error
    if changed or list(request.return_) != ["output"] or bound.arrays.keys() != {"query"}:
        return False
    return KERNELS[kernel].make().single_call and _can_be_padded(bound)


def _can_be_padded(bound: BoundRequest) -> bool:
    """True for masks and positions that say the same of a token whatever comes after it."""
    bucket, position = PaddedSizes.of(bound.batch, bound.queries), bound.spec.position
    longest = POSITIONS.of(position).length
    if outgrown_length(position) is not None or (longest is not None and bucket.length > longest):
        return False
    plain = bound.sequence_masks is None and all(isinstance(mask, Causal | SlidingWindow) for mask in bound.spec.masks)
    return plain and bound.batch > 0 < bound.queries and bucket.batch * bucket.length <= MOST_TOKENS


def _hides_what_follows(masks: list[Mask]) -> bool:
    return any(isinstance(mask, Causal) for mask in masks)


def padded(bound: BoundRequest, bucket: PaddedSizes) -> BoundRequest:
    """The request with zeros for the tokens and sequences that are added, and the lengths where no mask hides them."""
    (batch, length), query = bucket, bound.arrays["query"]
    whole = np.zeros((batch, length, query.shape[2]), query.dtype).view(type(query))
    whole[: bound.batch, : bound.queries] = query
    arrays = {"query": whole}
    if not _hides_what_follows(bound.spec.masks):
        arrays["key_lengths"] = np.full(batch, bound.queries, np.int64)
    return bound.replaced(batch=batch, queries=length, keys=length, arrays=arrays)


class ForwardRecipe(Recipe):
    """Captures the forward pass of a bucket."""

    def __init__(
        self, bound: BoundRequest, bucket: PaddedSizes, kernel: str, device: Device, need: Callable[[BoundRequest], int]
    ) -> None:
        """``need``: the planned bytes of a bound request by this kernel."""
        whole = padded(bound, bucket)
        self._shapes = {name: (array.shape, _dtype(name, bound)) for name, array in whole.arrays.items()}
        blank = {
            name: np.broadcast_to(np.zeros((), x.dtype), x.shape).view(type(x)) for name, x in whole.arrays.items()
        }
        self._bound = whole.replaced(module=None, arrays=blank)
        self._kernel, self._device, self._need = kernel, device, need
        self._results: tuple[Tensor, ...] = ()

    def inputs(self) -> dict[str, Tensor]:
        """Zeros, all of them real tokens."""
        made = {name: self._pinned(shape, dtype).zero_() for name, (shape, dtype) in self._shapes.items()}
        if "key_lengths" in made:
            made["key_lengths"].fill_(self._bound.queries)
        return made

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._device.torch.type == "cuda")

    @torch.inference_mode()
    def run(self, module: Module, tensors: Tensors) -> tuple[Tensor, ...]:
        """The output, and a number that is finite if all keys and values are."""
        there = {name: x.to(self._device.torch, non_blocking=True) for name, x in tensors.items()}
        computed = self._computed(module, there)
        if not self._results:  # pinned before anything is captured
            self._results = tuple(self._pinned(x.shape, x.dtype) for x in computed)
        return tuple(host.copy_(x, non_blocking=True) for host, x in zip(self._results, computed, strict=True))

    def _computed(self, module: Module, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        bound = self._bound.replaced(module=module)
        problem = compute.problem(bound, tensors, module.parameters, views=True)
        context = KERNELS[self._kernel].make().attend(problem, (), ())["context"]
        return compute.output(bound, module.parameters, context), sum_of(problem.k, problem.v)

    def need(self, module: Module) -> int:
        """The planned bytes of the padded pass, and of its inputs."""
        held = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())
        return self._need(self._bound.replaced(module=module)) + held


def _dtype(name: str, bound: BoundRequest) -> torch.dtype:
    return torch.int64 if name == "key_lengths" else TORCH_DTYPES[bound.dtype]


@dataclass(eq=False, slots=True)
class GraphedForward(DeviceOperation):
    """The forward pass of a module, launched as one CUDA graph."""

    bound: BoundRequest
    bucket: PaddedSizes
    graph: CapturedGraph
    kernel: str

    def upload(self, device: torch.device) -> Uploaded:
        """Pad the input. The graph copies it to the device."""
        return compute.upload(padded(self.bound, self.bucket), torch.device("cpu"))

    @torch.inference_mode()
    def launch(self, uploaded: Uploaded) -> Results:
        """Replay the graph, and wait for it."""
        bound, parameters = self.bound, uploaded.parameters
        whole, total = self.graph.replay(uploaded.tensors)
        output = whole[: bound.batch, : bound.queries].clone()
        if not are_finite(total):  # only the queries that may look at a key that is not finite give NaN
            query = uploaded.tensors["query"][: bound.batch, : bound.queries]
            query = to_device(query, parameters["q_proj.weight"].device)
            problem = compute.problem(bound, {"query": query}, parameters)
            output = compute.output(bound, parameters, attend(problem, (), kernel=self.kernel).context)
        return {"output": compute.in_reply(output, bound, "output")}


def graphed(
    bound: BoundRequest, kernel: str, device: Device, need: Callable[[BoundRequest], int]
) -> GraphedForward | None:
    """The pass by the graph of its bucket; None until one is captured. ``takes`` has accepted the request."""
    if bound.module is None or not _can_be_padded(bound):  # several requests joined may have too many tokens
        return None
    bucket = PaddedSizes.of(bound.batch, bound.queries)
    graph = device.graphs.find(
        bound.module, (kernel, bucket), lambda: ForwardRecipe(bound, bucket, kernel, device, need)
    )
    return None if graph is None else GraphedForward(bound, bucket, graph, kernel)
