"""PyTorch's kernels of attention on a GPU in a rehearsal: results without numbers, pairs, and workspace.

Flash and the memory-efficient kernel take tensors ``[B, L, H, W]``, cuDNN's ``[B, H, L, W]``. Source: the schemas of
these operations in PyTorch 2.13, ``flash_attn/flash_api.cpp`` and ``attention_backward.cu``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from attention_service.core.kernels.fused.cuda_attention import flash_width
from attention_service.core.masks.bands import Band

_MULTIPROCESSORS = 132
"""Number for an H100; on a larger GPU flash cuts keys into more parts, each of which takes as much."""
_IN_REGISTERS = 128
"""The widest values whose context the memory-efficient kernel keeps in registers; wider ones in memory, in float32."""
_TOP_LEFT = 1
"""The mask of the memory-efficient kernel that begins at the first key; the next one ends at the last."""


def _flash_band(queries: int, keys: int, causal: bool, options: Mapping[str, Any]) -> Band:
    diagonal, left, right = keys - queries, options.get("window_size_left"), options.get("window_size_right")
    high = diagonal if causal else None if right is None else diagonal + right
    return Band(None if left is None else diagonal - left, high)


def _efficient_band(queries: int, keys: int, kind: int, _: Mapping[str, Any]) -> Band:
    return Band(high=None if not kind else 0 if kind == _TOP_LEFT else keys - queries)


def _cudnn_band(queries: int, keys: int, causal: bool, _: Mapping[str, Any]) -> Band:
    return Band(high=0 if causal else None)


def _argument(args: Sequence[Any], at: int) -> Any:
    """An argument; False where it is left out, as the dispatcher does with the last ones that are so by default."""
    return args[at] if len(args) > at else False


class Called:
    """One call of such a kernel, forward or backward."""

    def __init__(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        band, self.back, at, length = KERNELS[name]
        self._name, self._args = name, args
        self.q, self.k, self.v = args[self.back : self.back + 3]
        self.queries, keys = self.q.shape[length], self.k.shape[length]
        self.heads = self.q.shape[3 - length]
        self.length = length
        pairs = band(self.queries, keys, _argument(args, at), options).pairs(self.queries, keys)
        self.pairs = self.q.shape[0] * self.heads * pairs
        """Pairs whose weights it computes."""

    @property
    def products(self) -> int:
        """FLOPs of its products; backward the scores again, and two products for each of the forward pass."""
        of_q, of_v = self.q.shape[3], self.v.shape[3]
        return int(2 * self.pairs * (3 * of_q + 2 * of_v if self.back else of_q + of_v))

    @property
    def workspace_bytes(self) -> int:
        """Upper bound on what it takes beside inputs and results.

        Backward, ∂q is summed in float32 and ∂k by head; what flash gets in other layouts it copies. The other kernel
        sums half types of ∂k and ∂v in float32, too, and was seen to take as much again where heads share their keys.
        """
        flash, half, width = "flash" in self._name, self.q.itemsize == 2, flash_width(self.q.shape[3])
        if not self.back:
            if flash:
                return int(4 * self._splits() * self.q.shape[:3].numel() * (width + 1))
            wide = "efficient" in self._name and half and self.v.shape[3] > _IN_REGISTERS
            return int(4 * wide * self.q.shape[:3].numel() * self.v.shape[3])
        rows = -(-self.queries // 128) * 128
        summed = 4 * self.q.shape[0] * self.heads * rows * (width + 1)
        if flash:
            summed += sum(x.nbytes for x in (self._args[0], self._args[4]) if not x.is_contiguous())
        elif half:
            summed *= 4
        elif not self.k.stride(2):
            summed *= 2
        grouped = self.heads // self.k.shape[3 - self.length] > 1
        return int(summed + grouped * 2 * self.k.nbytes * self.heads // self.k.shape[3 - self.length])

    def _splits(self) -> int:
        """Parts of the keys that flash sums apart where queries are few, as ``num_splits_heuristic`` chooses; or 0."""
        rows, heads, kv_heads = self.queries, self.heads, self.k.shape[3 - self.length]
        if rows == 1:  # the heads of a group are rows of one tile
            rows, heads = heads // kv_heads, kv_heads
        tiles = self.q.shape[0] * heads * -(-rows // 64)
        at_once, width = 2 * _MULTIPROCESSORS, self.q.shape[3]
        if not tiles or tiles >= 0.8 * at_once:
            return 0
        blocks = -(-self.k.shape[1] // (256 if width <= 64 else 128 if width <= 128 else 64))
        counts = [
            n for n in range(1, min(128, at_once, blocks) + 1) if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))
        ]
        used = [tiles * n / at_once / -(-tiles * n // at_once) for n in counts]
        best = next((n for n, share in zip(counts, used, strict=True) if share >= 0.85 * max(used)), 1)
        return best if best > 1 else 0


_Bands = Callable[[int, int, Any, Mapping[str, Any]], Band]
KERNELS: Final[dict[str, tuple[_Bands, int, int, int]]] = {
    "_flash_attention_forward": (_flash_band, 0, 8, 1),
    "_flash_attention_backward": (_flash_band, 1, 11, 1),
    "_efficient_attention_forward": (_efficient_band, 0, 9, 1),
    "_efficient_attention_backward": (_efficient_band, 1, 14, 1),
    "_scaled_dot_product_cudnn_attention": (_cudnn_band, 0, 6, 2),
}
"""The band of each; the place of q, and of what tells the mask, among the arguments; and the dimension of lengths."""


def results(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of a call over meta tensors."""
    if name.endswith("backward"):
        made = tuple(torch.empty_like(x) for x in args[1:4])
        if "flash" in name:
            return made
        return (*made, args[0].new_empty(0) if args[4] is None else torch.empty_like(args[4]))
    q, k, v = args[:3]
    nothing, length = q.new_empty(0), KERNELS[name][3]
    sums = q.new_empty(q.shape[0], q.shape[3 - length], q.shape[length], dtype=torch.float32)
    if name == "_efficient_attention_forward":
        sums = sums if _argument(args, 10) else nothing
        return q.new_empty(*q.shape[:3], v.shape[3]), sums, nothing, nothing, q.shape[1], k.shape[1]
    if name == "_flash_attention_forward":
        return torch.empty_like(q), sums, nothing, nothing, nothing
    return torch.empty_like(q), nothing, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing
