"""The library without which no tensor, not even a fake one, can be on cuda:0 under a build of torch for the CPU."""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = Path(__file__).with_name("device_guard.cpp")


@cache
def library() -> ctypes.CDLL | None:
    """The library, loaded; None without g++ on Linux, or where torch was built for a GPU and has its own.

    It must be loaded before autograd first runs, which starts a thread for each device that it knows.
    """
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux" or torch.version.cuda is not None:
        return None
    loaded = ctypes.CDLL(str(_built(compiler)))
    loaded.fake_cuda.argtypes, loaded.fake_cuda.restype = [ctypes.c_bool], ctypes.c_bool
    return loaded


@contextlib.contextmanager
def fake_device() -> Iterator[None]:
    """Let autograd find a GPU within the block."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("there is no library of the device guard; ask `library` first")
    if not loaded.fake_cuda(True):
        raise RuntimeError("this build of torch calls `getAccelerator` in another way")
    try:
        yield
    finally:
        loaded.fake_cuda(False)


def _built(compiler: str) -> Path:
    """The library as a file, built by the first process of this user that asks for it."""
    content = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode())
    folder = Path(tempfile.gettempdir()) / f"attention-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; nothing is loaded from there")
    found = folder / f"{content.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            unfinished = found.with_suffix(".part")
            options = [f"-I{path}" for path in include_paths()]
            for path in library_paths():
                options += [f"-L{path}", f"-Wl,-rpath,{path}"]
            command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", str(unfinished)]
            subprocess.run([*command, *options, "-lc10", "-ltorch_cpu"], check=True, timeout=120)
            unfinished.rename(found)
    return found
