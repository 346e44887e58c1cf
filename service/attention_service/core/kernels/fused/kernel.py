"""PyTorch's scaled_dot_product_attention: the same numbers without the weights in memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Executed, Kernel, Needs
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_flash
from attention_service.core.kernels.fused.cpu_slices import attend_in_slices, takes
from attention_service.core.kernels.fused.cuda_backends import fastest
from attention_service.core.kernels.fused.fused_rehearsal import called_on_cpu, called_on_gpu
from attention_service.core.kernels.fused.pad_to_same_width import same_width
from attention_service.core.masks.rules import causal_offset
from attention_service.core.masks.visibility import is_padded, real_keys, visibility, without_padding
from attention_service.core.normalizers import NORMALIZERS, Softmax
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Problem
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import one_for_each_query_head


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

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context by one call, its arguments made so that each device takes its fast path."""
        clean = without_padding(problem) if is_padded(problem) else problem
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
        on_gpu = (self.device or q.device.type) == "cuda"
        mask, blind, causal = _mask(problem, normalizer.options.temperature, on_gpu=on_gpu)
        grouped = q.shape[1] != k.shape[1]
        if grouped and on_gpu:
            # The memory-efficient kernel, which takes masks and float32, knows no groups.
            k, v, grouped = one_for_each_query_head(k, q.shape[1]), one_for_each_query_head(v, q.shape[1]), False
        width = v.shape[-1]
        if not on_gpu:  # laid out otherwise, PyTorch would compute it stage by stage, with all scores in memory
            q, k, v, mask = cpu_flash.laid_out(*same_width(q, k, v), mask)
        if not on_gpu and takes(q, k, v, mask):
            context = attend_in_slices(q, k, v, mask, scale, causal=causal)
        elif q.is_cuda:
            with fastest(q, k, v, mask, causal=causal):
                context = self.call(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        else:
            context = self.call(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        if context.shape[-1] != width:
            context = context[..., :width]
        return {"context": context if blind is None else context.masked_fill(blind, 0)}

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
        if needs.dropout:
            yield "the fused kernel draws its own dropout, which cannot be told again"
        if needs.edits:
            yield "edits need every tap in memory, which the fused kernel does not keep"
        if needs.taps_gradient:
            yield "scores and weights are wanted in memory, where the fused kernel never has them"
        if needs.double_backward:
            yield "gradients of the fused kernel cannot be differentiated again"

    def executed(self, sizes: Extent) -> Executed:
        """Count every pair, but for a plainly causal mask only those up to the diagonal."""
        if not sizes.plainly_causal:
            return super().executed(sizes)
        square = min(sizes.queries, sizes.keys)
        return Executed(sizes.batch * (square * (square + 1) // 2 + (sizes.queries - square) * sizes.keys))

    def rehearsal(self, sizes: Extent) -> "Fused":
        """Return one whose call starts the operations of PyTorch's kernel on meta tensors."""
        return Fused("cpu", called_on_cpu) if sizes.threads else Fused("cuda", called_on_gpu)


def _mask(problem: Problem, temperature: float, *, on_gpu: bool) -> tuple[Tensor | None, Tensor | None, bool]:
    """The mask to pass, which queries may look nowhere ``[.., .., Q, 1]``, and whether it is plainly causal.

    Blind queries are let look everywhere, and their output is zeroed: what a kernel makes of a row of −∞, and of its
    gradient, differs from device to device.
    """
    if not (problem.spec.masks or problem.mask is not None or is_padded(problem)):
        return None, None, False
    reach = _reach(problem)
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
    if problem.offsets.device.type != "cpu":
        return None  # to read them would wait for everything queued on the device
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
