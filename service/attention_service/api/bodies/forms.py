"""Bodies that are forms with a file, as clients of OpenAI's API send sounds."""

import re
from base64 import b64encode
from typing import Any, Final

import orjson
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from attention_contract.base import WireModel
from attention_contract.errors import Unreadable
from attention_contract.validation import clip

FORM: Final = "multipart/form-data"
_MOST_PARTS: Final = 1024
_LONGEST_HEADER: Final = 4096
_PATH: Final = re.compile(r"\[([^\[\]]*)\]")


def read_form(body: memoryview, content_type: bytes, model: type[WireModel]) -> dict[str, Any]:
    """Return the fields of a form. A file is ``{"base64": …}``; texts that are no texts in ``model`` are JSON.

    Names have the form of the ``openai`` package: ``attention[layers][]`` is one layer more. Raises Unreadable.
    """
    parts = _FormParts()
    try:
        parser = MultipartParser(_boundary(content_type), parts.callbacks)
        parser.write(bytes(body))
        parser.finalize()
    except FormParserError:
        raise Unreadable(f"the body is no valid {FORM}") from None
    if not parts.ended:
        raise Unreadable(f"the body is no valid {FORM}: it ends before its last boundary")
    fields: dict[str, Any] = {}
    for name, is_file, value in parts.fields:
        top = name.partition("[")[0]
        kind = model.model_fields.get(top)
        if is_file:
            read: Any = {"base64": b64encode(value).decode()}
        else:
            read = _text(value) if kind is not None and str in _kinds(kind.annotation) else _json(value)
        _put(fields, [top, *_PATH.findall(name[len(top) :])], read)
    return fields


def _boundary(content_type: bytes) -> bytes:
    _, options = parse_options_header(content_type)
    boundary: bytes | None = options.get(b"boundary")
    if not boundary:
        raise Unreadable(f"Content-Type: {FORM} needs a boundary")
    return boundary


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unreadable("the form has a text that is not UTF-8") from None


def _json(value: bytes) -> Any:
    """A number, flag, list or object as JSON; other texts as they are."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return _text(value)


def _put(fields: dict[str, Any], path: list[str], value: Any) -> None:
    """Put a value into a place of nested objects; a path that ends with an empty name is a list. Raises Unreadable."""
    whole, place = path[0], fields
    is_list = path[-1] == ""
    for name in path[: -2 if is_list else -1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise Unreadable(f"the form has the field {clip(whole)} in two ways")
    name = path[-2] if is_list else path[-1]
    if is_list and isinstance(several := place.setdefault(name, []), list):
        several.append(value)
    elif is_list or name in place:
        raise Unreadable(f"the form has the field {clip(whole)} more than once; send it once")
    else:
        place[name] = value


class _FormParts:
    """Collects the parts of a form as they are parsed: name, True for a file, and content."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, bool, bytes]] = []
        self.ended = False
        self._header = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._content: list[bytes] = []
        self.callbacks: Any = {
            "on_part_begin": self._begin, "on_part_data": self._data, "on_part_end": self._end,
            "on_header_field": self._field, "on_header_value": self._value_part, "on_header_end": self._header_end,
            "on_end": self._finish,
        }  # fmt: skip

    def _begin(self) -> None:
        if len(self.fields) >= _MOST_PARTS:
            raise Unreadable(f"the form has more than {_MOST_PARTS} fields")
        self._headers, self._content = {}, []

    def _field(self, data: bytes, start: int, end: int) -> None:
        self._header = self._limited(self._header + data[start:end])

    def _value_part(self, data: bytes, start: int, end: int) -> None:
        self._value = self._limited(self._value + data[start:end])

    def _limited(self, header: bytes) -> bytes:
        if len(header) > _LONGEST_HEADER:
            raise Unreadable("the form has a header that is too long")
        return header

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def _end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if not name:
            raise Unreadable("the form has a part without a name")
        self.fields.append((_text(name)[:256], b"filename" in options, b"".join(self._content)))

    def _finish(self) -> None:
        self.ended = True
