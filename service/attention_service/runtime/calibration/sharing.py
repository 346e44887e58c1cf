"""Several servers on one folder: one of them measures the device, and the others load its calibration."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from attention_service.runtime.calibration import stored
from attention_service.runtime.device.torch_device import Device

LOOK_S = 2.0
"""Seconds between two attempts to take the lock."""


@asynccontextmanager
async def turn(root: Path, device: Device, since: datetime | None) -> AsyncIterator[stored.Stored | None]:
    """Wait until no other server measures this device; yield a calibration newer than ``since``, or None.

    The lock is the operating system's: it ends with the process that holds it. If the folder is not writable, there is
    nothing to share, and no waiting.
    """
    try:
        descriptor = await asyncio.to_thread(_opened, stored.lock_path(root, device))
    except OSError:
        yield None
        return
    try:
        while not _taken(descriptor):
            await asyncio.sleep(LOOK_S)
        yield await asyncio.to_thread(_newer, root, device, since)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: better measured twice than never
        return True
    return True


def _newer(root: Path, device: Device, since: datetime | None) -> stored.Stored | None:
    found = stored.load(root, device)
    return found if found is not None and (since is None or found.at > since) else None
