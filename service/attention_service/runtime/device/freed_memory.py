"""Freed memory of the host: what the C library keeps for the next tensor, and when it gives it back."""

import ctypes
from contextlib import suppress
from typing import Final

import psutil

MUCH: Final = 2**26
"""Freed bytes that a process gives back to the system, or to the GPU; less is kept for its next request."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Constants of ``malloc.h``."""


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, so that the next tensor does not get pages that must be cleared first.

    Up to 32 MiB at a time, beyond which glibc always asks the system; half a gibibyte in all. Without it glibc gives
    back all but 128 KiB, until it has learned better. One arena for all threads: what the device's thread computes is
    freed by the event loop that sent it, and would otherwise be kept once for each of them; threads that there are
    keep theirs, so it is for the main thread to call this before it starts others. Of another C library, nothing.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**29)
        mallopt(_M_ARENA_MAX, 1)


def private_bytes(process: psutil.Process | None = None) -> int:
    """Return the memory that a process, by default this one, holds alone. What was freed and kept counts.

    The pages of files do not: libraries, which processes share and the system takes back (PyTorch's build for CUDA
    maps hundreds of megabytes more than its build for CPUs), and memory that is shared.
    """
    taken = (process or psutil.Process()).memory_info()
    return int(taken.rss - getattr(taken, "shared", 0))


def give_back_freed_memory() -> None:
    """Have the C library give back what it keeps: after work of another kind than what follows. It takes milliseconds.

    Of another C library than glibc, nothing.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
