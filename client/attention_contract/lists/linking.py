"""The compiled code as a process gets at it: linked from where it is kept, or made before by a process of its own.

To compile it (numba, LLVM's optimizer) takes 130 MiB and some seconds; to link what came of that, a third of it and no
time to speak of. It is kept as an object file, where Python keeps its own compiled code, or in the user's folder for
such things: for these sources, this compiler and this processor.
"""

import os
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
_PATIENCE: Final = 600
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
    cpu, features = binding.get_host_cpu_name(), _features()
    digest = sha256("|".join((version("numba"), version("llvmlite"), cpu, features)).encode())
    for source in (*sorted(_HERE.glob("*.py")), _HERE.parent / "tensors.py"):
        digest.update(source.read_bytes())
    name = f"lists-{digest.hexdigest()[:16]}.o"
    machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features)
    kept = _kept(name)
    code = _made(cpu, features) if kept is None else kept
    parts = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
    library = parts.export_symbol("scan").export_symbol("write").link(binding.create_lljit_compiler(machine), "lists")
    if kept is None:  # and fits, or it would be in the way the next time
        _keep(name, code)
    ffi = FFI()
    scan = ffi.cast(f"int64_t (*)({_SCAN})", library["scan"])
    write = ffi.cast(f"int64_t (*)({_WRITE})", library["write"])
    return Linked(scan, write, ffi.from_buffer, library)


def _features() -> str:
    """What the processor can do, as LLVM writes it; its registers of 512 bits are to be used.

    So does MKL; with smaller ones, writing takes 20 % longer.
    """
    with suppress(RuntimeError):  # a processor that LLVM does not know
        features = binding.get_host_cpu_features()
        return f"{features.flatten()}{',-prefer-256-bit' if features.get('avx512f') else ''}"
    return ""


def _made(cpu: str, features: str) -> bytes:
    """Have the code compiled; what goes wrong is told on standard error."""
    path = os.pathsep.join(filter(None, (str(_HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "attention_contract.lists.building", cpu, features]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE)  # noqa: S603
    return done.stdout


def _folders() -> Iterator[Path]:
    yield Path(cache_from_source(__file__)).parent
    with suppress(RuntimeError):  # there is no home
        yield Path.home() / ".cache" / "attention"


def _kept(name: str) -> bytes | None:
    """The code, if it is kept, whole, by whom it is run by or installed by: what others put there is not run."""
    for folder in _folders():
        with suppress(OSError), (folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_uid in {_owner(), _HERE.stat().st_uid}:
                kept = file.read()
                if sha256(kept[_DIGEST:]).digest() == kept[:_DIGEST]:
                    return kept[_DIGEST:]
    return None


def _owner() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _keep(name: str, code: bytes) -> None:
    """Keep the code in the first folder that can be written to; where there is none, it is made at each start."""
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                whole = Path(aside) / name
                whole.write_bytes(sha256(code).digest() + code)
                whole.replace(folder / name)
            return
