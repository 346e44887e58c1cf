"""Between the host and a GPU: through pinned memory, piece by piece, so that the host's copy and the bus's overlap.

From memory that is not pinned the driver copies to a buffer of its own and waits for each piece; into pinned memory it
is our copy, and the next piece is filled while the last one is on its way. PyTorch keeps pinned memory for reuse, and
gives none of it out again before the copies that read it have ended (``torch.cuda.CachingHostAllocator``).
"""

import torch
from torch import Tensor

PIECE = 2**22
"""Bytes of a piece: long enough for the bus to be at its full rate, short beside a body that is worth the trouble."""


def to_device(host: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, in this dtype or its own; it may still be on its way, which only the device notices.

    It is converted on the way: the device holds it once.
    """
    dtype = dtype or host.dtype
    if host.dtype == dtype and host.device == device:
        return host
    if device.type != "cuda" or host.device.type != "cpu" or not host.numel():
        return host.to(device, dtype)
    placed = torch.empty(host.shape, dtype=dtype, device=device)
    numbers = max(1, PIECE // dtype.itemsize)
    pieces = zip(torch.split(host.reshape(-1), numbers), torch.split(placed.view(-1), numbers), strict=True)
    for source, target in pieces:
        pinned = torch.empty(source.shape, dtype=dtype, pin_memory=True)
        target.copy_(pinned.copy_(source), non_blocking=True)
    return placed


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, all of it there; in pinned memory, to which the device wrote by itself."""
    if tensor.device.type != "cuda" or not tensor.numel():
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned
