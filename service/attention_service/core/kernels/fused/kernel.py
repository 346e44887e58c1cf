"""PyTorch's scaled_dot_product_attention: the same numbers without the weights in memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Kernel, KernelWork, Needs
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_flash, cuda_attention
from attention_service.core.kernels.fused.cpu_flash import called_on_cpu, same_width
from attention_service.core.kernels.fused.cpu_slices import attend_in_slices
from attention_service.core.masks.bands import Band
from attention_service.core.masks.rules import band_of, causal_offset
from attention_service.core.masks.visibility import real_keys, visibility, without_padding
from attention_service.core.normalizers import NORMALIZERS, Softmax
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Problem
from attention_service.core.scores import SCORES, Product
from attention_service.core.slices import cuts, exceeds_a_slice


@KERNELS.register(
    "fused",
    formula="softmax(q·k · scale / T + mask / T) · v, block by block with a running maximum and sum",
    gradient="scores recomputed, w = exp(s − lse), ∂s = w (∂o·v − ∂o·o); not twice differentiable",
    cost="O(n²·d) time, O(n·d) memory",
    source="Dao et al. 2022, algorithm 1; Rabe & Staats 2021",
)
@dataclass(frozen=True)
class Fused(Kernel):
    """Never keeps the weights: takes dot-product scores with a softmax, every mask, and grouped heads."""

    holds = "masks"
    recomputes = True
    automatic = True
    single_call = True

    device: str | None = None
    """The type of the device for which the arguments are made; None for that of the tensors."""
    call: Callable[..., Tensor] = scaled_dot_product_attention
    """The function that a CPU calls."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context by one call, its arguments made so that each device takes its fast path."""
        clean = problem if problem.finite else without_padding(problem)
        normalizer = NORMALIZERS.of(problem.spec.normalizer)
        score = SCORES.of(problem.spec.score)
        if not isinstance(score, Product) or not isinstance(normalizer, Softmax) or problem.spec.softcap is not None:
            raise ValueError("the fused kernel computes a plain softmax over dot products; ask `unsuitable` first")
        v = clean.v
        q, k, factor = score.factors(clean.q, clean.k, problem.learned)
        scale = factor / normalizer.options.temperature
        if scale <= 0:
            # CPU: a causal mask becomes NaN under a scale that is not positive.
            q, scale = q * scale, 1.0
        if (self.device or q.device.type) == "cuda":
            band = band_on_gpu(problem)
            mask = blind = None
            if band is None:
                mask, blind, _ = _mask(problem, normalizer.options.temperature, on_gpu=True)
            context = cuda_attention.attend(q, k, v, scale, mask, band or Band())
        else:
            mask, blind, causal = _mask(problem, normalizer.options.temperature, on_gpu=False)
            context = self._on_cpu(q, k, v, mask, scale, causal=causal)
        return {"context": context if blind is None else context.masked_fill(blind, 0)}

    def _on_cpu(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool) -> Tensor:
        grouped, width = q.shape[1] != k.shape[1], v.shape[-1]
        # laid out otherwise, PyTorch would compute it stage by stage, with all scores in memory
        q, k, v, mask = cpu_flash.laid_out(*same_width(q, k, v), mask)
        if _takes_slices(q, k, v, mask):
            context = attend_in_slices(q, k, v, mask, scale, causal=causal)
        else:
            context = self.call(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        return context if context.shape[-1] == width else context[..., :width]

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield what needs the weights, or another formula."""
        normalizer = NORMALIZERS.of(spec.normalizer)
        score = SCORES.of(spec.score)
        if not isinstance(score, Product):
            yield f"the fused kernel has no score {spec.score.name}"
        elif not score.plain and dtype.itemsize == 2:
            yield f"the fused kernel would round to {_name(dtype)} what a {spec.score.name} score makes of q and k"
        if spec.softcap is not None:
            yield "the fused kernel has no softcap"
        if POSITIONS.of(spec.position).biased:
            yield f"the fused kernel takes no bias for each head and pair, as {spec.position.name} has"
        if not isinstance(normalizer, Softmax):
            yield f"the fused kernel has no normalizer {spec.normalizer.name}"
        elif normalizer.options.sinks:
            yield "the fused kernel has no sinks"
        runs_in = torch.promote_types(dtype, torch.float32)
        if normalizer.runs_in(dtype) != runs_in:
            yield (
                f"the fused kernel normalizes {_name(dtype)} inputs in {_name(runs_in)}, "
                f"not in {spec.normalizer.dtype} as the spec asks"
            )
        if needs.device == "cuda" and dtype == torch.float64:
            yield "the fused kernel has no float64 on a GPU"
        if needs.dropout:
            yield "the fused kernel draws its own dropout, which cannot be told again"
        if needs.edits:
            yield "edits need every tap in memory, which the fused kernel does not keep"
        if needs.taps_gradient:
            yield "scores and weights are wanted in memory, where the fused kernel never has them"
        if needs.double_backward:
            yield "gradients of the fused kernel cannot be differentiated again"

    def executed(self, sizes: Extent) -> KernelWork:
        """Count every pair, but for a plainly causal mask, and on a GPU for any band, only those allowed."""
        if not sizes.threads and (band := band_of_sizes(sizes)) is not None:
            return KernelWork(sizes.batch * band.pairs(sizes.queries, sizes.keys))
        if not sizes.plainly_causal:
            return super().executed(sizes)
        square = min(sizes.queries, sizes.keys)
        return KernelWork(sizes.batch * (square * (square + 1) // 2 + (sizes.queries - square) * sizes.keys))

    def rehearsal(self, sizes: Extent) -> "Fused":
        """Return one whose call starts the operations of PyTorch's kernel on meta tensors."""
        return Fused("cpu", called_on_cpu) if sizes.threads else Fused("cuda")


def _takes_slices(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True for what takes longer than a slice and for gradients of half types, if the mask needs no gradient.

    All is on a CPU. PyTorch's own gradient of half types sums ∂o·o over the rounded context.
    """
    if mask is not None and mask.requires_grad:
        return False
    batch, heads, queries, width = q.shape
    work = 4.0 * batch * heads * queries * k.shape[2] * width
    half = q.dtype.itemsize == 2 and work > 0
    return (half and _is_differentiated(q, k, v)) or (exceeds_a_slice(work) and cuts(q))


def _is_differentiated(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def band_on_gpu(problem: Problem) -> Band | None:
    """Return the band that the masks of a problem leave, if a GPU's kernel computes it without a mask in memory."""
    masks = problem.mask, problem.key_mask, problem.key_lengths, problem.sequence_masks
    if any(x is not None for x in masks) or (problem.offsets is not None and problem.spec.masks) or problem.added_keys:
        return None
    queries, width = problem.q.shape[2], max(problem.q.shape[3], problem.v.shape[3])
    band = band_of(problem.spec.masks, queries, problem.keys, problem.past)
    taken = band is not None and cuda_attention.takes(band, problem.q.dtype, width, queries, problem.keys)
    return band if taken else None


def band_of_sizes(sizes: Extent) -> Band | None:
    """Return the same from the sizes of a problem."""
    if sizes.mask_shape or sizes.padded or (sizes.batched_offsets and sizes.spec.masks) or sizes.added_keys:
        return None
    dtype = {2: torch.bfloat16, 4: torch.float32}.get(sizes.itemsize)
    band = band_of(sizes.spec.masks, sizes.queries, sizes.keys, sizes.past)
    width = max(sizes.head_dim, sizes.value_dim)
    taken = band is not None and dtype and cuda_attention.takes(band, dtype, width, sizes.queries, sizes.keys)
    return band if taken else None


def _mask(problem: Problem, temperature: float, *, on_gpu: bool) -> tuple[Tensor | None, Tensor | None, bool]:
    """The mask to pass, which queries may look nowhere ``[.., .., Q, 1]``, and whether it is plainly causal.

    Blind queries are let look everywhere, and their output is zeroed: what a kernel makes of a row of −∞, and of its
    gradient, differs from device to device.
    """
    if not problem.spec.masks and problem.mask is problem.key_mask is problem.key_lengths is None:
        return None, None, False
    reach = None if on_gpu and problem.offsets is not None else _reach(problem)  # reading them waits for the device
    if reach == 0 and not problem.added_keys and problem.mask is None and real_keys(problem) is None:
        return None, None, True
    if reach is not None and reach >= problem.keys - 1:  # nothing is hidden, as from the last query of a decode
        problem = replace(problem, spec=problem.spec.model_copy(update={"masks": []}))
    seen = visibility(problem)
    if seen.bias is None:
        if seen.allowed is None:
            return None, None, False
        blind = ~seen.allowed.any(-1, keepdim=True)
        return seen.allowed | blind, blind, False
    bias = seen.bias
    if bias.requires_grad and not on_gpu:  # what is summed over a row is not rounded to a half type before
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    bias = bias if seen.allowed is None else bias.masked_fill(~seen.allowed, -torch.inf)
    blind = (bias == -torch.inf).all(-1, keepdim=True)
    if temperature != 1:  # a half type would round, and what overflows would forbid
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32)) / temperature
    return _passable(bias.masked_fill(blind, 0), problem.q, on_gpu=on_gpu), blind, False


def _reach(problem: Problem) -> int | None:
    """The r for which the spec's masks say j ≤ i + r and nothing else; None where that is not what they say."""
    if problem.sequence_masks is not None:
        return None
    reach = causal_offset(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
    if reach is None or problem.offsets is None:
        return None if reach is None else reach + problem.past
    offsets = set(problem.offsets.flatten().tolist())
    return reach + offsets.pop() if len(offsets) == 1 else None


def _passable(bias: Tensor, q: Tensor, *, on_gpu: bool) -> Tensor:
    """The bias in a dtype that the kernel takes. Finite numbers stay finite: −∞ would forbid, and +∞ gives NaN."""
    dtype = q.dtype if on_gpu else torch.promote_types(q.dtype, torch.float32)
    largest = torch.finfo(dtype).max
    if torch.finfo(bias.dtype).max > largest:
        bias = torch.where(bias.abs() == torch.inf, bias, bias.clamp(-largest, largest))
    return bias.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
