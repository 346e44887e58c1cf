"""Tensors on the wire: the dtypes, the JSON forms, and the pydantic types of tensor fields.

A tensor is a numpy array on both sides of the wire. JSON carries it in one of three forms: nested lists;
``{"dtype", "shape", "data": [flat]}``; ``{"dtype", "shape", "base64"}`` (little-endian, row-major). Non-finite numbers
are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Nested lists cannot say which sizes follow a size of 0;
the other forms can. bfloat16 is numpy's by way of ml_dtypes.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Final, Literal, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

DtypeName = Literal["bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
FloatName = Literal["float16", "bfloat16", "float32", "float64"]
Encoding = Literal["list", "base64"]
Kind = Literal["float", "bool", "int", "mask"]

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype(np.bool_),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
"""The dtypes of the wire, by name."""

FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
INTS: Final = frozenset({"int32", "int64"})
MAX_RANK: Final = 8
MAX_BYTES: Final = 2**63 - 1
"""The most bytes of a shape, sizes of 0 counted as 1: all that an address can name."""

_EMPTY: Final = {"float": "float64", "mask": "float64", "int": "int64", "bool": "bool"}
_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAME_OF_DTYPE: Final = {dtype: name for name, dtype in DTYPES.items()}


class Untyped(np.ndarray[Any, Any]):
    """Numbers that came as nested lists and so state no dtype.

    Held as bool, int64 or float64. Where a float is wanted they take the dtype of their surroundings: the module's,
    else that of the request's other tensors, else float32. They travel as nested lists in every form of a body.
    """


class TensorFault(ValueError):
    """A fault of one tensor, raised where its field is not known."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts


def dtype_name(array: NDArray[Any]) -> str:
    """The wire's name of an array's dtype. Raises TensorFault for one that the wire does not carry."""
    name = _NAME_OF_DTYPE.get(array.dtype) or _NAME_OF_DTYPE.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise TensorFault(f"dtype {array.dtype} cannot be sent; expected one of {', '.join(DTYPES)}")
    return name


def decode(value: Any) -> NDArray[Any]:
    """The array that a JSON value stands for. Raises TensorFault where it stands for none."""
    if isinstance(value, Mapping):
        return _decode_object(value)
    if isinstance(value, bool | int | float | str | list | tuple):
        return _decode_nested(value)
    raise TensorFault(f"expected a nested list or an object with dtype and shape, got {type(value).__name__}")


def encode(array: NDArray[Any], encoding: Encoding) -> Any:
    """The JSON value of an array: what orjson writes as nested lists, or an object with base64."""
    if encoding == "base64" and not isinstance(array, Untyped):
        name = dtype_name(array)
        data = np.ascontiguousarray(array, dtype=DTYPES[name])
        return {
            "dtype": name,
            "shape": list(array.shape),
            "base64": base64.b64encode(data.reshape(-1).view(np.uint8).data).decode("ascii"),
        }
    if dtype_name(array) in {"float16", "bfloat16"}:
        array = array.astype(np.float32)
    array = _little_endian(array)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _with_non_finite_as_text(array.tolist())
    return np.ascontiguousarray(array) if array.ndim else array.item()


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(DTYPES[dtype_name(array)], copy=False)


def _with_non_finite_as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_non_finite_as_text(item) for item in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode_nested(value: Any) -> NDArray[Any]:
    """Flatten level by level in C, so that a ragged list is found without a Python loop over its numbers."""
    shape: list[int] = []
    level: list[Any] = [value]
    while level and isinstance(level[0], list | tuple):
        if not set(map(type, level)) <= {list, tuple}:
            raise TensorFault(f"ragged: numbers and lists are mixed at depth {len(shape)}")
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise TensorFault(
                f"ragged: the lists at depth {len(shape)} have between {min(lengths)} and {max(lengths)} elements; "
                "expected the same number in each"
            )
        shape.append(lengths.pop())
        if len(shape) > MAX_RANK:
            raise TensorFault(f"nested more than {MAX_RANK} lists deep")
        level = list(chain.from_iterable(level))
    if not level:
        shape = shape or [0]
        return np.zeros(shape, np.float64).view(Untyped)
    if any(issubclass(kind, list | tuple) for kind in set(map(type, level))):
        raise TensorFault(f"ragged: numbers and lists are mixed at depth {len(shape)}")
    return _from_numbers(level).reshape(shape).view(Untyped)


def _from_numbers(numbers: list[Any]) -> NDArray[Any]:
    kinds = set(map(type, numbers))
    if str in kinds or any(issubclass(kind, np.generic) for kind in kinds):
        numbers = [_number(item) for item in numbers]
        kinds = set(map(type, numbers))
    if kinds == {bool}:
        return np.array(numbers, np.bool_)
    if not kinds <= {int, float}:
        kinds_named = ", ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in kinds))
        raise TensorFault(f"expected numbers only, or true and false only; got {kinds_named}")
    try:
        return np.array(numbers, np.int64 if kinds == {int} else np.float64)
    except OverflowError:
        raise TensorFault("an integer does not fit 64 bits") from None


def _number(item: Any) -> Any:
    if isinstance(item, np.generic):
        return item.item()  # numpy's float64 is a float, but of another type
    if not isinstance(item, str):
        return item
    if item not in _NON_FINITE:
        raise TensorFault(f"expected a number or one of {', '.join(_NON_FINITE)}; got {item[:20]!r}")
    return _NON_FINITE[item]


def _decode_object(value: Mapping[str, Any]) -> NDArray[Any]:
    forms = {"data", "base64"} & set(value)
    if set(value) - {"dtype", "shape", "data", "base64"} or len(forms) != 1 or not {"dtype", "shape"} <= set(value):
        raise TensorFault('expected an object with "dtype", "shape" and one of "data" or "base64"')
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise TensorFault(f"unknown dtype {str(value['dtype'])[:20]!r}; expected one of {', '.join(DTYPES)}")
    shape = checked_shape(value["shape"])
    return _from_flat(value["data"], dtype, shape) if "data" in value else _from_base64(value["base64"], dtype, shape)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape whose sizes are non-negative integers. Raises TensorFault otherwise."""
    if not isinstance(shape, list | tuple):
        raise TensorFault("shape is not a list of non-negative integers")
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise TensorFault("shape is not a list of non-negative integers")
        count *= size or 1
    if len(shape) > MAX_RANK:
        raise TensorFault(f"{len(shape)} dimensions; expected at most {MAX_RANK}")
    if count * 8 > MAX_BYTES:
        raise TensorFault(f"shape of {len(shape)} dimensions overflows")
    return tuple(shape)


def _from_flat(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if not isinstance(data, list):
        raise TensorFault("data is not a flat list of numbers")
    if len(data) != math.prod(shape):
        raise TensorFault(f"shape {list(shape)} takes {math.prod(shape)} numbers, got {len(data)}")
    if any(issubclass(kind, list | dict) for kind in set(map(type, data))):
        raise TensorFault("data is nested; expected a flat list of numbers, row by row")
    return typed(_from_numbers(data) if data else np.zeros(0, dtype), dtype, shape)


def typed(numbers: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Numbers of JSON, row by row, as a tensor of a dtype. Raises TensorFault where one of them does not fit it."""
    if numbers.size and dtype.kind in "bi":
        if numbers.dtype.kind != dtype.kind or _outside(numbers, dtype):
            raise TensorFault(f"data does not fit dtype {_NAME_OF_DTYPE[dtype]}")
    elif numbers.size and numbers.dtype.kind == "b":
        raise TensorFault(f"data is true and false; expected numbers for dtype {_NAME_OF_DTYPE[dtype]}")
    return cast(numbers, _NAME_OF_DTYPE[dtype]).reshape(shape)


def _outside(numbers: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "b":
        return False
    limits = np.iinfo(dtype)
    return bool(numbers.min() < limits.min or numbers.max() > limits.max)


def _from_base64(text: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if not isinstance(text, str):
        raise TensorFault("base64 is not a string")
    expected = math.prod(shape) * dtype.itemsize
    if len(text) != -(-expected // 3) * 4:
        raise TensorFault(
            f"shape {list(shape)} of {_NAME_OF_DTYPE[dtype]} takes {expected} bytes, which are {-(-expected // 3) * 4} "
            f"characters of base64 with the padding; got {len(text)}"
        )
    try:
        data = bytearray(binascii.a2b_base64(text, strict_mode=True))  # writable, as an array is expected to be
    except (binascii.Error, ValueError):
        raise TensorFault("base64 holds characters outside its alphabet") from None
    return from_buffer(data, dtype, shape)


def from_buffer(data: bytes | bytearray | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array over little-endian, row-major bytes, without a copy unless they lie unaligned.

    Raises TensorFault on a wrong length.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise TensorFault(f"shape {list(shape)} of {_NAME_OF_DTYPE[dtype]} takes {expected} bytes, got {len(data)}")
    if dtype.kind == "b":
        raw = np.frombuffer(data, np.uint8)
        if raw.size and raw.max() > 1:
            raise TensorFault("a bool tensor holds bytes other than 0 and 1")
        return raw.view(np.bool_).reshape(shape)
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def cast(array: NDArray[Any], name: str) -> NDArray[Any]:
    """The array in another dtype. Raises TensorFault where a finite number would become infinite."""
    dtype = DTYPES[name]
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    narrowed = array.dtype.kind in "if" and name in FLOATS and dtype.itemsize < 8
    if narrowed and bool((np.isfinite(array) & ~np.isfinite(result)).any()):
        raise TensorFault(f"a number is too large for {name}")
    return result


def _check_kind(array: NDArray[Any], kind: Kind) -> NDArray[Any]:
    name = dtype_name(array)
    untyped = isinstance(array, Untyped)
    if kind == "float" and (name in FLOATS or (untyped and name in INTS)):
        return array
    if kind == "int" and name in INTS:
        return array
    if kind == "bool":
        if name == "bool":
            return array
        if name in INTS and bool(((array == 0) | (array == 1)).all()):
            return array.astype(np.bool_)
    if kind == "mask":
        if name in FLOATS or name == "bool":
            return array
        if untyped and not bool(((array == 0) | (array == 1)).all()):
            return array.astype(np.float64).view(Untyped)
        raise TensorFault(
            "a mask is boolean (true lets a query look) or floating (added to the scores), and integers could mean "
            'either; send true and false, or {"dtype": "float32", "shape": …, "data": …}'
        )
    wanted = {"float": "floating point", "int": "int32 or int64", "bool": "bool"}[kind]
    raise TensorFault(f"expected {wanted}, got {name}")


class TensorField:
    """Makes pydantic read and describe a numpy array of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        names = {"float": FLOATS, "int": INTS, "bool": {"bool"}, "mask": FLOATS | {"bool"}}[kind]
        self._taken = frozenset(DTYPES[name] for name in names)
        """The dtypes that are taken as they are."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate, serialization=core_schema.plain_serializer_function_ser_schema(nested, when_used="json")
        )

    def _validate(self, value: Any) -> NDArray[Any]:
        if type(value) is np.ndarray and value.dtype in self._taken:
            return value
        try:
            array = _little_endian(value) if isinstance(value, np.ndarray) else decode(value)
            if isinstance(array, Untyped) and not array.size:  # an empty list does not say what it would hold
                array = array.astype(DTYPES[_EMPTY[self.kind]])
            return _check_kind(array, self.kind)
        except TensorFault as fault:
            raise PydanticCustomError(
                "invalid_tensor", "{message}", {"message": fault.message, **fault.facts}
            ) from None

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"x-tensor": self.kind}


class NumberOfData:
    """Marks a number of a reply that may be NaN or infinite, so that JSON has a text for it."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-non-finite": True}


def nested(array: NDArray[Any]) -> Any:
    """The array as nested Python lists, its non-finite numbers as strings."""
    value = encode(array, "list")
    return value.tolist() if isinstance(value, np.ndarray) else value


_SCHEMAS: Final = "#/components/schemas/"
_NUMBERS: Final[list[dict[str, Any]]] = [
    {"type": "number", "format": "double"},
    {"type": "boolean"},
    {"$ref": f"{_SCHEMAS}NonFinite"},
]
_FORM: Final[dict[str, Any]] = {
    "dtype": {"$ref": f"{_SCHEMAS}TensorDtype"},
    "shape": {"type": "array", "items": {"type": "integer", "format": "int64", "minimum": 0}, "maxItems": MAX_RANK},
}


def _form(description: str, **content: Any) -> dict[str, Any]:
    """The schema of a tensor as an object, which has its numbers in one field."""
    required = [*_FORM, *content]
    properties = {**_FORM, **content}
    return {"type": "object", "description": description, "required": required, "additionalProperties": False,
            "properties": properties}  # fmt: skip


TENSOR_SCHEMAS: Final[dict[str, Any]] = {
    "Tensor": {
        "title": "Tensor",
        "description": "A number, nested lists of numbers, or an object with dtype, shape and flat data or base64.",
        "oneOf": [  # of anyOf, openapi-generator makes one class with the fields of all
            *_NUMBERS,
            {"type": "array", "items": {}},  # of itself; generators do not read a union that contains itself
            {"$ref": f"{_SCHEMAS}TensorNumbers"},
            {"$ref": f"{_SCHEMAS}TensorBase64"},
        ],
    },
    "TensorNumbers": _form(
        "A tensor as the list of its numbers, row by row.", data={"type": "array", "items": {"anyOf": _NUMBERS}}
    ),
    "TensorBase64": _form(
        "A tensor as the base64 of its bytes, little-endian, row by row.",
        base64={"type": "string", "contentEncoding": "base64"},
    ),
    "TensorDtype": {"type": "string", "enum": list(DTYPES)},
    "NonFinite": {"type": "string", "enum": list(_NON_FINITE), "description": "A number that JSON lacks."},
}
"""The JSON Schemas of a tensor, to stand once among the components of the OpenAPI document, where each field that a
model's own schema marks with ``x-tensor`` refers to ``Tensor``, and a number marked with ``x-non-finite`` also to
``NonFinite``."""

AnyNumber: TypeAlias = Annotated[float, NumberOfData()]
Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = Annotated[NDArray[Any], TensorField("float")]
BoolArray: TypeAlias = Annotated[NDArray[Any], TensorField("bool")]
IntArray: TypeAlias = Annotated[NDArray[Any], TensorField("int")]
MaskArray: TypeAlias = Annotated[NDArray[Any], TensorField("mask")]
