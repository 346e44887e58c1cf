"""What compiled code does with eight or 64 bytes of a text at once, and how it is compiled.

Characters are compared, found and converted as the bytes of one machine word, the first one in its lowest byte; after
Lemire and Langdale, "Parsing Gigabytes of JSON per Second", 2019 (arXiv:1902.08318). Places are not checked here:
callers keep them within the array.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.extending
from llvmlite import binding, ir
from numba import types

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

Byte: Any = numba.uint8
Word: Any = numba.uint64
Int: Any = numba.int64
_config: Any = numba.config
_intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic

_BYTE, _WORD, _BLOCK = ir.IntType(8), ir.IntType(64), ir.VectorType(ir.IntType(8), 64)
_TEXT = 0x3030303030303030
"""Eight times the character 0."""


def _prefer_wide_registers() -> None:
    """Take registers of 512 bits where there are any, as MKL does: with smaller ones, writing takes 20 % longer."""
    if _config.CPU_FEATURES is None and _config.ENABLE_AVX:
        with suppress(RuntimeError):  # a processor that LLVM does not know
            features = binding.get_host_cpu_features()
            if features.get("avx512f"):
                _config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"


def _cache() -> Path | None:
    """Where compiled code is kept: for these very sources, since numba looks at that of each function alone.

    In ``NUMBA_CACHE_DIR`` if that is set, else beside the sources, else in the user's folder for such things.
    """
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "tensors.py"]
    name = f"lists-{sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()[:16]}"
    with suppress(RuntimeError):  # there is no home
        folders = [_config.CACHE_DIR] if _config.CACHE_DIR else [here / "__pycache__", Path.home() / ".cache"]
        for folder in map(Path, folders):
            with suppress(OSError):
                (folder / name).mkdir(parents=True, exist_ok=True)
                if os.access(folder / name, os.W_OK):
                    return folder / name
    return None


_prefer_wide_registers()
_CACHE = _cache()


def compiled(function: FunctionT) -> FunctionT:
    """A function that is compiled when it is first called, and runs without the interpreter's lock."""
    compiling: Any = numba.njit
    before, _config.CACHE_DIR = _config.CACHE_DIR, str(_CACHE or "")
    try:
        made: FunctionT = compiling(nogil=True, error_model="numpy", cache=_CACHE is not None)(function)
    finally:
        _config.CACHE_DIR = before
    return made


@_intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """The eight bytes of an array of bytes from ``at`` on."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        place = _place(context, builder, signature.args[0], values)
        word = builder.load(builder.bitcast(place, _WORD.as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@_intrinsic
def store(typing: Any, array: Any, at: Any, word: Any) -> Any:
    """Write eight bytes into an array of bytes from ``at`` on."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        place = _place(context, builder, signature.args[0], values)
        builder.store(values[2], builder.bitcast(place, _WORD.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@_intrinsic
def places(typing: Any, array: Any, at: Any, one: Any, other: Any) -> Any:
    """Which of the 64 bytes of an array from ``at`` on are one or the other: the first one in the lowest bit."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        place = _place(context, builder, signature.args[0], values)
        block = builder.load(builder.bitcast(place, _BLOCK.as_pointer()))
        block.align = 1
        found = [builder.icmp_unsigned("==", block, _repeated(builder, value)) for value in values[2:]]
        return builder.bitcast(builder.or_(*found), _WORD)

    return types.uint64(array, types.int64, types.uint8, types.uint8), generate


@_intrinsic
def high_product(typing: Any, one: Any, other: Any) -> Any:
    """The upper 64 of the 128 bits of a product."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(value, wide) for value in values))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)

    return types.uint64(types.uint64, types.uint64), generate


@_intrinsic
def as_double(typing: Any, word: Any) -> Any:
    """The double whose bits these are."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(types.uint64), generate


def _counting(name: str) -> Any:
    """A function of one word that LLVM has an instruction for."""

    @_intrinsic
    def count(typing: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            more = () if name == "ctpop" else (ir.Constant(ir.IntType(1), 0),)  # 64 for a word without ones
            return getattr(builder, name)(values[0], *more)

        return types.uint64(types.uint64), generate

    return count


ones, leading_zeros, trailing_zeros = map(_counting, ("ctpop", "ctlz", "cttz"))


def _place(context: Any, builder: Any, kind: Any, values: Sequence[Any]) -> Any:
    data = context.make_array(kind)(context, builder, values[0]).data
    return builder.gep(builder.bitcast(data, _BYTE.as_pointer()), [values[1]])


def _repeated(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_BLOCK, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), 64), None))


@compiled
def digits(word: int) -> int:
    """Eight characters, 0 to 9 each stands for itself; another one leaves bits that ``is_decimal`` finds."""
    return Word(word) ^ Word(_TEXT)


@compiled
def is_decimal(word: int) -> bool:
    """Whether each byte of ``digits`` is one."""
    return ((word + Word(0x7676767676767676)) | word) & Word(0x8080808080808080) == Word(0)


@compiled
def number_of(word: int) -> int:
    """The number that eight digits are, the first one the highest."""
    word = (word * Word(10) + (word >> Word(8))) & Word(0x00FF00FF00FF00FF)
    word = (word * Word(100) + (word >> Word(16))) & Word(0x0000FFFF0000FFFF)
    return (word * Word(10_000) + (word >> Word(32))) & Word(0xFFFFFFFF)
