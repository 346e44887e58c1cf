"""What compiled code does with 8, 32 or 64 bytes of a text at once, and what compiles it.

Characters are compared, found and converted as the bytes of one machine word, the first one in its lowest byte; after
Lemire and Langdale, "Parsing Gigabytes of JSON per Second", 2019 (arXiv:1902.08318). Places are not checked here:
callers keep them within the array.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba
import numba.extending
from llvmlite import ir
from numba import types

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

Byte: Any = numba.uint8
Word: Any = numba.uint64
Int: Any = numba.int64
_tuple: Any = types.UniTuple
_intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BLOCK, _HALF = ir.VectorType(_BYTE, 64), ir.VectorType(_BYTE, 32)
_TEXT = 0x3030303030303030
"""Eight times the character 0."""


def compiled(function: FunctionT) -> FunctionT:
    """A function that numba compiles, which raises nothing."""
    compiling: Any = numba.njit
    made: FunctionT = compiling(error_model="numpy")(function)
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
def numbers_before(typing: Any, array: Any, end: Any, masks: Any, size: Any) -> Any:
    """The numbers that each eight of the 24 characters before ``end`` are, and if all that count are digits, else 0.

    ``masks``: for each ``size`` 32 bytes, which of the 32 characters before ``end`` count; eight of them don't, ever.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        def loaded(kind: Any, values: Sequence[Any]) -> Any:
            block = builder.load(builder.bitcast(_place(context, builder, kind, values), _HALF.as_pointer()))
            block.align = 1
            return block

        def joined(pairs: Any, bits: int, power: int) -> Any:
            """Of numbers side by side the first times a power of ten and the second."""
            lanes = ir.VectorType(ir.IntType(bits), 256 // bits)
            pairs = builder.bitcast(pairs, lanes)

            def each(value: int) -> Any:
                return ir.Constant(lanes, [value] * lanes.count)

            high = builder.mul(builder.and_(pairs, each(2 ** (bits // 2) - 1)), each(power))
            return builder.add(high, builder.lshr(pairs, each(bits // 2)))

        width = ir.Constant(values[1].type, 32)
        characters = loaded(signature.args[0], (values[0], builder.sub(values[1], width)))
        counted = loaded(signature.args[2], (values[2], builder.mul(values[3], width)))
        found = builder.and_(builder.xor(characters, ir.Constant(_HALF, [ord("0")] * 32)), counted)
        others = builder.icmp_unsigned(">", found, ir.Constant(_HALF, [9] * 32))
        none = builder.icmp_unsigned("==", builder.bitcast(others, ir.IntType(32)), ir.Constant(ir.IntType(32), 0))
        lanes = joined(joined(joined(found, 16, 10), 32, 100), 64, 10_000)
        numbers = [builder.extract_element(lanes, ir.Constant(ir.IntType(32), index)) for index in (1, 2, 3)]
        return context.make_tuple(builder, signature.return_type, [*numbers, builder.zext(none, _WORD)])

    return _tuple(types.uint64, 4)(array, types.int64, masks, types.int64), generate


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


@_intrinsic
def as_word(typing: Any, number: Any) -> Any:
    """The bits of a double."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        return builder.bitcast(values[0], _WORD)

    return types.uint64(types.float64), generate


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
