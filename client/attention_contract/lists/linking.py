"""The compiled code as a process gets at it: linked from where it is kept, or made before by a process of its own.

To compile it (numba, LLVM's optimizer) takes 130 MiB and some seconds; to link what came of that, a third of it and no
time to speak of. It is kept as an object file, where Python keeps its own compiled code, or in the user's folder for
such things: for these sources, this compiler and this processor.
"""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final

from cffi import FFI
from llvmlite import binding

_HERE: Final = Path(__file__).parent
_DIGEST: Final = 32
"""Bytes before the code, by which a file that is not whole is told."""
_SCAN: Final = "void *, int64_t, void *, void *, void *, void *, void *, void *"
_WRITE: Final = "void *, int64_t, void *, int64_t, void *, void *, void *, void *, void *, int64_t"
_PATIENCE: Final = 300
"""Seconds after which the compiler is taken to hang."""


@dataclass(frozen=True, slots=True)
class Linked:
    """What is called, as ``building`` says."""

    scan: Callable[..., int]
    write: Callable[..., int]
    address: Callable[[Any], Any]
    """Of what holds memory, which is kept for as long as the address is."""
    library: Any
    """The code is where it is for as long as this is."""


def link() -> Linked:
    """Link the code.

    Raises ImportError where numba, llvmlite or cffi is not installed, and OSError, RuntimeError or
    subprocess.SubprocessError where the code could not be compiled or linked.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = _processor()
    place = version("numba"), version("llvmlite"), binding.get_process_triple(), cpu, features
    digest = sha256("|".join(place).encode())
    for source in (*sorted(_HERE.glob("*.py")), _HERE.parent / "tensors.py"):
        digest.update(source.read_bytes())
    name = f"lists-{digest.hexdigest()[:16]}.o"
    if (code := _kept(name)) is not None:
        with suppress(RuntimeError):  # it is made anew
            return _linked(code, cpu, features)
    code = _made(cpu, features)
    linked = _linked(code, cpu, features)
    _keep(name, code)
    return linked


def _linked(code: bytes, cpu: str, features: str) -> Linked:
    machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features)
    parts = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
    library = parts.export_symbol("scan").export_symbol("write").link(binding.create_lljit_compiler(machine), "lists")
    ffi = FFI()
    scan = ffi.cast(f"int64_t (*)({_SCAN})", library["scan"])
    write = ffi.cast(f"int64_t (*)({_WRITE})", library["write"])
    return Linked(scan, write, ffi.from_buffer, library)


def _processor() -> tuple[str, str]:
    """The processor and what it can do, as LLVM writes them; its registers of 512 bits are to be used.

    So does MKL; with smaller ones, writing takes 20 % longer.
    """
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # a processor that LLVM does not know
        return "generic", ""
    wide = ",-prefer-256-bit" if features.get("avx512f") else ""
    return binding.get_host_cpu_name(), f"{features.flatten()}{wide}"


class _Making:
    """The process that compiles, while there is one."""

    process: "subprocess.Popen[bytes] | None" = None


def _made(cpu: str, features: str) -> bytes:
    """Have the code compiled; what goes wrong is told on standard error."""
    # What numba is told to do otherwise, it is not told here; nor is it interrupted where a server is.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.o"
        command = [sys.executable, "-P", "-m", "attention_contract.lists.building", cpu, features, str(path)]
        _Making.process = process = subprocess.Popen(  # noqa: S603
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            status = process.wait(_PATIENCE)
        finally:
            process.kill()
            process.wait()
            _Making.process = None
        if status:
            raise subprocess.CalledProcessError(status, command)
        return path.read_bytes()


def give_up() -> None:
    """Stop what compiles."""
    if process := _Making.process:
        process.kill()


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _folders() -> Iterator[Path]:
    yield Path(cache_from_source(__file__)).parent
    with suppress(RuntimeError):  # there is no home
        yield Path.home() / ".cache" / "attention"


def _kept(name: str) -> bytes | None:
    """The code, if it is kept, whole."""
    for folder in _folders():
        with suppress(OSError):
            # Neither somewhere else nor a pipe, which would be waited for.
            flags = (
                os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            )
            with open(os.open(folder / name, flags), "rb") as file:
                if _is_ours(os.fstat(file.fileno())) and _is_ours(folder.stat()):
                    kept = file.read()
                    if sha256(kept[_DIGEST:]).digest() == kept[:_DIGEST]:
                        return kept[_DIGEST:]
    return None


def _is_ours(found: os.stat_result) -> bool:
    """Whether only who runs or installed this can have written it: what others write is not run."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid in {os.geteuid(), _HERE.stat().st_uid} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keep(name: str, code: bytes) -> None:
    """Keep the code in the first folder that is ours; where there is none, it is made at each start."""
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours(folder.stat()):
                with tempfile.TemporaryDirectory(dir=folder) as aside:
                    whole = Path(aside) / name
                    whole.write_bytes(sha256(code).digest() + code)
                    whole.chmod(0o644)
                    whole.replace(folder / name)
                return
