"""The form of a request: all that it says but for the numbers of its tensors. Equal requests are understood once.

The header of a safetensors file is the form: names, dtypes, shapes and places of its tensors, and the rest of the
request. One that was read before needs neither parsing nor validation again; the tensors are views at known places.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from pydantic import BaseModel

from attention_contract.tensors import FLOATS, Array, TensorFault, from_buffer
from attention_contract.wire import SAFETENSORS, from_body, read_header

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_HEADER: Final = 4096
"""Bytes of a header that is remembered."""
MOST: Final = 1024
"""The forms that are kept; those that were not sent for the longest go first."""


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a field's tensor lie, and what they are."""

    field: str
    first: int
    last: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int

    def array(self, body: memoryview) -> Array:
        """The tensor of a body that is long enough."""
        if self.dtype.kind == "b":
            return from_buffer(body[self.first : self.last], self.dtype, self.shape)
        array = np.frombuffer(body, self.dtype, self.count, self.first).reshape(self.shape)
        return array if array.flags.aligned else array.copy()


@dataclass(frozen=True)
class Form(Generic[ModelT]):
    """What requests say whose tensors differ in their numbers alone.

    Its tensors are fields of their own, floating-point or bool: neither is checked for more than its header says and
    ``from_buffer`` sees.
    """

    request: ModelT
    """Without those tensors."""
    places: tuple[_Place, ...]

    def filled(self, body: memoryview) -> ModelT:
        """The request with the tensors of a body of this form. Raises TensorFault for bytes that are no tensor."""
        return self.request.model_copy(update=self.arrays(body))

    def arrays(self, body: memoryview) -> dict[str, Array]:
        """Those tensors, by their field. Raises TensorFault for bytes that are none."""
        return {at.field: at.array(body) for at in self.places}


class Forms:
    """The forms that were sent of late."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[type[BaseModel], bytes, int], Form[Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Form[Any]]:
        return iter(self._known.values())

    def read(self, model: type[ModelT], body: memoryview) -> ModelT:
        """The request that a safetensors file holds; its form is remembered where it has one that is worth it.

        Raises what ``from_body`` does.
        """
        form = self.find(model, body)
        if form is not None:
            try:
                return form.filled(body)
            except TensorFault:
                return from_body(model, body, SAFETENSORS, "request")  # which says what is wrong with it
        request = from_body(model, body, SAFETENSORS, "request")
        form = _form_of(request, body) if (header := header_of(body)) else None
        if form is not None:
            self._known[model, header, len(body)] = form
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        return request

    def find(self, model: type[ModelT], body: memoryview) -> Form[ModelT] | None:
        """The form of this body, where one like it was read before."""
        key = model, header_of(body), len(body)
        form: Form[ModelT] | None = self._known.get(key)
        if form is not None:
            self._known.move_to_end(key)
        return form


def header_of(body: memoryview) -> bytes:
    """The header of a safetensors file, its length before it; nothing where it is not worth remembering."""
    start = 8 + int.from_bytes(body[:8], "little")
    return bytes(body[:start]) if 8 < start <= min(8 + MAX_HEADER, len(body)) else b""


def _form_of(request: ModelT, body: memoryview) -> Form[ModelT] | None:
    """The form of a valid request; None where a tensor is checked by its values, or is no field of its own."""
    header, start = read_header(body)
    header.pop("__metadata__", None)
    places = []
    for name, entry in header.items():
        array = getattr(request, name, None)
        if not isinstance(array, np.ndarray) or name not in type(request).model_fields:
            return None
        first, last = entry["data_offsets"]
        place = _Place(name, start + first, start + last, array.dtype, array.shape, array.size)
        if array.dtype.name not in {*FLOATS, "bool"} or array.nbytes != last - first:
            return None
        places.append(place)
    return Form(request.model_copy(update=dict.fromkeys(header)), tuple(places))
