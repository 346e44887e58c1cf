"""The envelope of an inference: a JSON object, and the tensors in it or in the bytes behind it.

Sources: the Open Inference Protocol (inference_rest.md) and Triton's extension for binary tensors.
"""

from types import MappingProxyType
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.tensors import DTYPES, Array, TensorFault, checked_shape, decode, from_buffer, typed
from attention_contract.validation import clip, suggestion
from attention_service.api.doors.oip.v2_errors import NotSupported

WIRE_DTYPES: Final = MappingProxyType({
    "BOOL": "bool", "INT32": "int32", "INT64": "int64", "FP16": "float16", "BF16": "bfloat16", "FP32": "float32",
    "FP64": "float64",
})  # fmt: skip
"""The wire's name of each datatype of the protocol that tensors here have."""
DATATYPES: Final = MappingProxyType({name: datatype for datatype, name in WIRE_DTYPES.items()})
SIZE: Final = "binary_data_size"
BINARY: Final = "binary_data"
MAX_TENSORS: Final = 4096
"""Inputs, and outputs, of one envelope."""
_RESERVED: Final = frozenset({"priority", "timeout", "binary_data_output", "headers"})
_RESERVED_STARTS: Final = ("sequence_", "triton_")
_SHARED: Final = "shared_memory_"
Name = Annotated[str, Field(min_length=1, max_length=256)]
Parameters = dict[str, Any]


class InputTensor(WireModel):
    """One input: its numbers are ``data``, or so many bytes behind the JSON object as ``binary_data_size`` says."""

    name: Name
    datatype: str
    shape: Any
    data: Any = None
    parameters: Parameters | None = None


class RequestedOutput(WireModel):
    """One output that the reply is to have."""

    name: Name
    parameters: Parameters | None = None


class InferenceRequest(WireModel):
    """The JSON object of a request."""

    id: str | None = Field(default=None, max_length=1024)
    model_name: str | None = None
    """Some clients repeat the name of the path; nothing reads it."""
    model_version: str | None = None
    parameters: Parameters | None = None
    inputs: Listed[InputTensor] = Field(max_length=MAX_TENSORS)
    outputs: Listed[RequestedOutput] | None = Field(default=None, max_length=MAX_TENSORS)

    @property
    def options(self) -> Parameters:
        """The parameters but for those that the protocol reserves."""
        return {name: value for name, value in (self.parameters or {}).items() if not _is_reserved(name)}

    @property
    def timeout_s(self) -> float | None:
        """Seconds that the request may take; None for any time. On the wire these are microseconds, 0 for any time."""
        timeout = (self.parameters or {}).get("timeout", 0)
        if type(timeout) is not int or not 0 <= timeout < 2**63:
            raise InvalidRequest.at("parameters.timeout", "expected a whole number of microseconds, 0 or more")
        return timeout / 1e6 or None

    @property
    def wanted(self) -> dict[str, bool | None]:
        """The requested outputs, and whether each is to be binary: True, False, or None where the request leaves it."""
        parameters = self.parameters or {}
        by_default = _flag(parameters, "binary_data_output", "parameters")
        binary_by_name: dict[str, bool | None] = {}
        for index, output in enumerate(self.outputs or ()):
            place = f"outputs.{index}.parameters"
            _check_parameters(output.parameters, {BINARY}, place)
            own = _flag(output.parameters or {}, BINARY, place)
            binary_by_name[output.name] = by_default if own is None else own
        return binary_by_name

    @property
    def binary_by_default(self) -> bool | None:
        """The form of the outputs if none is requested by name."""
        return _flag(self.parameters or {}, "binary_data_output", "parameters")

    def check(self) -> None:
        """Raise InvalidRequest or NotSupported for a reserved parameter that cannot be followed."""
        if (self.parameters or {}).get("sequence_id") not in (None, 0, ""):
            place = "parameters.sequence_id"
            raise NotSupported.at(place, "there are no sequences; a session under /v1 keeps a past")
        _ = self.timeout_s, self.binary_by_default


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith(_RESERVED_STARTS)


def _flag(parameters: Parameters, name: str, place: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and type(value) is not bool:
        raise InvalidRequest.at(f"{place}.{name}", "expected true or false")
    return value


def _check_parameters(parameters: Parameters | None, known: set[str], place: str) -> None:
    """Raise InvalidRequest for a parameter of an input or output that nobody reads."""
    for name in parameters or ():
        if name.startswith(_SHARED):
            raise NotSupported(
                f"{place}: this server shares no memory with its callers; send and receive binary data",
                param=f"{place}.{clip(name)}",
            )
        if name not in known:
            raise InvalidRequest.at(f"{place}.{clip(name)}", f"there is no such parameter; {suggestion(name, known)}")


def tensors_of(request: InferenceRequest, binary: memoryview) -> dict[str, Array]:
    """The inputs by name. ``binary``: the bytes behind the JSON object, in the order of the inputs.

    Raises InvalidRequest or InvalidTensor, which name the input's place, where one is not whole.
    """
    tensors: dict[str, Array] = {}
    start = 0
    for index, tensor in enumerate(request.inputs):
        place = f"inputs.{index}"
        _check_parameters(tensor.parameters, {SIZE}, f"{place}.parameters")
        if tensor.name in tensors:
            raise InvalidTensor.at(f"{place}.name", f"the input {clip(tensor.name)!r} comes twice; send it once")
        dtype, shape = _dtype(tensor, place), _shape(tensor, place)
        size = (tensor.parameters or {}).get(SIZE)
        try:
            if size is None:
                tensors[tensor.name] = _from_data(tensor, dtype, shape)
                continue
            if type(size) is not int or not 0 <= size <= len(binary) - start:
                left = len(binary) - start
                raise InvalidTensor.at(
                    f"{place}.parameters.{SIZE}", f"expected a number of bytes of the {left} that are left of the body"
                )
            if tensor.data is not None:
                raise InvalidTensor.at(f"{place}.data", f"expected it or {SIZE}, got both")
            tensors[tensor.name] = from_buffer(binary[start : start + size], dtype, shape)
        except TensorFault as fault:
            at_fault = "data" if size is None else f"parameters.{SIZE}"
            raise InvalidTensor.at(f"{place}.{at_fault}", fault.message) from None
        start += size
    if start != len(binary):
        raise InvalidRequest.at("inputs", f"they take {start} bytes; {len(binary)} come behind the JSON object")
    return tensors


def _dtype(tensor: InputTensor, place: str) -> np.dtype[Any]:
    name = WIRE_DTYPES.get(tensor.datatype)
    if name is None:
        known = ", ".join(WIRE_DTYPES)
        raise InvalidTensor.at(f"{place}.datatype", f"unknown {clip(tensor.datatype, 20)!r}; expected one of {known}")
    return DTYPES[name]


def _shape(tensor: InputTensor, place: str) -> tuple[int, ...]:
    try:
        return checked_shape(tensor.shape)
    except TensorFault as fault:
        raise InvalidTensor.at(f"{place}.shape", fault.message) from None


def _from_data(tensor: InputTensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """A tensor of the numbers in the JSON text: all of them in one list, or nested as the shape says."""
    if not isinstance(tensor.data, list):
        raise TensorFault(f"expected a list of numbers, or the parameter {SIZE} and the bytes behind the JSON object")
    if tensor.datatype == "BF16":
        raise TensorFault(f"BF16 has no form in JSON; send its bytes behind the JSON object, with {SIZE}")
    numbers = decode(tensor.data)
    if numbers.ndim > 1 and numbers.shape != shape:
        raise TensorFault(f"the lists have the shape {list(numbers.shape)}; expected {list(shape)}, or one list")
    if numbers.size != (expected := int(np.prod(shape, dtype=object))):
        raise TensorFault(f"shape {list(shape)} takes {expected} numbers, got {numbers.size}")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise TensorFault(f"JSON has no NaN and no Infinity; send the bytes behind the JSON object, with {SIZE}")
    return typed(np.asarray(numbers).reshape(-1), dtype, shape)
