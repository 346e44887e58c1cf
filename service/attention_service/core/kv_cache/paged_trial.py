"""A trial of PyTorch's kernel for block tables: a device, or a PyTorch, may not have it."""

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.kv_cache.attention import attend_in_place
from attention_service.core.kv_cache.runs import SlotRun
from attention_service.core.kv_cache.slab import PageKind, Slab

_HEADS, _KV_HEADS, _WIDTH = 4, 2, 64
_SPECS = (AttentionSpec(masks=[Causal()]), AttentionSpec(masks=[Causal(), SlidingWindow(left=70)]))
_CLOSE = 0.02


def paged_fault(device: torch.device) -> str | None:
    """Return why steps on this device are not computed by PyTorch's kernel for block tables; None if they are.

    The kernel is called for each half type, for one sequence and for two, one query and three, with a window and
    without. Its numbers are compared with those of products. Raises what tells of the device rather than of the kernel:
    no memory, a device that is lost.
    """
    for dtype in (torch.float16, torch.bfloat16):
        try:
            error = _error(device, dtype)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, TypeError) as fault:
            return next(iter(str(fault).splitlines()), type(fault).__name__)
        if not error <= _CLOSE:
            return f"numbers in {dtype} that differ by {error:.3g}"
    return None


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of the kernel's numbers from those of products."""
    numbers = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(device, dtype)

    kind = PageKind(_KV_HEADS, _WIDTH, _WIDTH, dtype, device)
    slab = Slab.of(kind, 4, paged=True)
    for x in (slab.keys, slab.values):
        x.copy_(random(*x.shape))
    size, plain = kind.page_tokens, Slab(kind, slab.keys, slab.values, slab.users, slab.grain)
    places = [[(2 * size, size), (0, 44)], [(3 * size, 5)]]
    errors = []
    for spec in _SPECS:
        for queries, sequences in ((1, 1), (1, 2), (3, 2)):
            q = random(sequences, _HEADS, queries, _WIDTH)
            by_pages, by_products = (
                attend_in_place(q, [[SlotRun(store, *run) for run in runs] for runs in places[:sequences]], spec, {})
                for store in (slab, plain)
            )
            errors.append((by_pages.float() - by_products.float()).abs().max())
    return float(torch.stack(errors).max())
