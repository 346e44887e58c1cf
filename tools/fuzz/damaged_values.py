"""Damages of the files of a checkpoint: each entry of a JSON text, of a GGUF header, and each tensor, made another."""

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import gguf
import torch
from safetensors.torch import save
from tests.modules.gguf_bytes import entry, strings, text

VALUES: Final = (
    "null", "true", "-1", "0", "1.5", "2147483648", f"1{'0' * 400}", "9" * 5000, "1e308", "1e400", "NaN", "-Infinity",
    '""', '"x"', f'"{"9" * 5000}"', r'"\ud800"', r'"\u0000"', '"../net"', "[]", "[1]", "[[1]]", '["x", 1]', "{}",
    '{"a": 1}', '{"": null}', "[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000,
)  # fmt: skip
"""JSON of every type in the place of an entry, as text: Python writes some of these in no other way."""
KEYS: Final = ("", "x", "-1", "9" * 5000, "\ud800", "\u0663", "\u00b2")
"""Names in the place of that of an entry. Two are digits that ``int`` takes, or not, beside those of ASCII."""
_MARK: Final = "\u0001here\u0001"
_SHOWN: Final = 40


class Damage(NamedTuple):
    """Another content of a file, made when it is asked for."""

    place: tuple[str, ...]
    """The names of the entry, from the outermost."""
    made: str
    """The value, for messages."""
    content: Callable[[], bytes]


def json_damages(content: bytes) -> Iterator[Damage]:
    """A JSON text in which one entry is another value, is missing, or has another name."""
    whole = json.loads(content)
    for place in _places(whole):
        names = tuple(map(str, place))
        for value in VALUES:
            yield Damage(names, value[:_SHOWN], partial(_with_text, whole, place, value))
        if place:
            yield Damage(names, "(left out)", partial(_without, whole, place))
        for key in KEYS if place and isinstance(place[-1], str) else ():
            yield Damage(names, f"(named {key[:_SHOWN]!r})", partial(_renamed, whole, place, key))
    yield Damage((), "(half a file)", lambda: content[: len(content) // 2])
    yield Damage((), "(no text)", lambda: b"\xff" + content)


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of every entry; of a list, of its first and last."""
    yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list):
        for at in sorted({0, len(value) - 1} if value else ()):
            yield from _places(value[at], (*place, at))


def _with_text(whole: Any, place: tuple[str | int, ...], value: str) -> bytes:
    marked = json.dumps(replaced(whole, place, _MARK))
    return marked.replace(json.dumps(_MARK), value).encode()


def _without(whole: Any, place: tuple[str | int, ...]) -> bytes:
    return json.dumps(removed(whole, place)).encode()


def _renamed(whole: Any, place: tuple[str | int, ...], key: str) -> bytes:
    return json.dumps(replaced(removed(whole, place), (*place[:-1], key), entry_at(whole, place))).encode()


def entry_at(value: Any, place: tuple[str | int, ...]) -> Any:
    """The entry of a JSON value at a place. Raises KeyError, IndexError."""
    for key in place:
        value = value[key]
    return value


def replaced(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """The JSON value in which one entry is another, whether it was there or not."""
    if not place:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    key: Any = place[0]
    inner = value[key] if not isinstance(value, dict) or key in value else None
    copied[key] = replaced(inner, place[1:], new)
    return copied


def removed(value: Any, place: tuple[str | int, ...]) -> Any:
    """The JSON value without one entry."""
    copied = dict(value) if isinstance(value, dict) else list(value)
    key: Any = place[0]
    if len(place) == 1:
        del copied[key]
    else:
        copied[key] = removed(value[key], place[1:])
    return copied


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def safetensors_damages(content: bytes, tensors: dict[str, torch.Tensor]) -> Iterator[Damage]:
    """A file in which one tensor is another, and one whose header has another entry. ``tensors``: those of the file."""
    for name, x in tensors.items():
        for made, new in _others(x).items():
            yield Damage((name,), made, partial(_saved, tensors, name, new))
    size = int.from_bytes(content[:8], "little")
    for place, made, header in json_damages(content[8 : 8 + size].rstrip()):
        yield Damage(place, f"{made} in the header", partial(_with_header, header, content[8 + size :]))
    for length in (0, 1, 2**20, 2**40, 2**64 - 1):
        claimed = length.to_bytes(8, "little")
        yield Damage((), f"a header of {length} bytes", partial(bytes.__add__, claimed, content[8:]))


def _saved(tensors: dict[str, torch.Tensor], name: str, new: torch.Tensor | None) -> bytes:
    others = {key: x for key, x in tensors.items() if key != name}
    return save(others if new is None else {**others, name: new}, {"format": "pt"})


def _with_header(header: Callable[[], bytes], data: bytes) -> bytes:
    text = header()
    return len(text).to_bytes(8, "little") + text + data


def _others(x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What a tensor may be damaged to, by name; None for one that is missing."""
    flat = x.flatten()
    found: dict[str, torch.Tensor | None] = {
        "missing": None, "a number": flat[:1].reshape(()).clone(), "empty": flat[:0].clone(), "flat": flat.clone(),
        "no rows": flat[:0].reshape(0, max(x.shape[-1:] or [1])).clone(), "of one more dimension": x[None].clone(),
        "a row more": torch.cat([x, x[:1]]) if x.ndim else x[None].repeat(2),
        "half": x[: len(x) // 2].clone() if x.ndim else None,
        "of five dimensions": flat.reshape(1, 1, 1, 1, -1).clone(),
        "turned": x.movedim(0, -1).clone(memory_format=torch.contiguous_format) if x.ndim else None,
    }  # fmt: skip
    for dtype in (torch.int64, torch.int8, torch.bool, torch.uint8, torch.float64, torch.bfloat16, torch.complex64,
                  torch.float8_e4m3fn, torch.int32):  # fmt: skip
        if dtype != x.dtype:
            found[f"of {dtype}"] = x.float().clamp(-100, 100).to(dtype)
    if x.dtype.is_floating_point and x.element_size() > 1:
        found |= {"NaN": torch.full_like(x, float("nan")), "infinite": torch.full_like(x, float("inf"))}
    elif not x.dtype.is_floating_point and x.dtype != torch.bool:
        largest = torch.iinfo(x.dtype).max
        found |= {"the largest numbers": torch.full_like(x, largest), "negative": x.neg() if x.dtype.is_signed else x}
    return found


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _array(kind: int, form: str, *values: Any) -> tuple[int, bytes]:
    return 9, struct.pack(f"<IQ{len(values)}{form}", kind, len(values), *values)


GGUF_VALUES: Final = {
    "uint8": (0, b"\x01"), "int8": (1, b"\xff"), "uint16": (2, b"\xff\xff"), "int16": (3, b"\xff\xff"),
    "uint32 0": (4, bytes(4)), "uint32": (4, b"\xff" * 4), "int32": (5, b"\xff" * 4), "float32": (6, b"\0\0\xc0\x3f"),
    "float32 0": (6, bytes(4)), "float32 -1": (6, struct.pack("<f", -1)), "float32 NaN": (6, b"\0\0\xc0\x7f"),
    "float32 inf": (6, b"\0\0\x80\x7f"), "bool": (7, b"\x01"), "bool of 2": (7, b"\x02"), "uint64": (10, b"\xff" * 8),
    "uint64 0": (10, bytes(8)), "int64": (11, b"\xff" * 7 + b"\x7f"), "float64": (12, struct.pack("<d", 1e308)),
    "float64 NaN": (12, struct.pack("<d", float("nan"))), "no text": (8, text("")), "a text": (8, text("x")),
    "digits": (8, text("9" * 5000)), "bytes": (8, struct.pack("<Q", 2) + b"\xff\xfe"), "a long text": (8, b"\xff" * 8),
    "no type": (13, b""), "empty array": _array(4, "I"), "array of one": _array(4, "I", 7),
    "array": _array(4, "I", 1, 2, 3), "array of floats": _array(6, "f", 1.5, float("nan")),
    "array of bools": _array(7, "?", True, False), "array of texts": strings(["a", "b"]), "array of none": strings([]),
    "array of arrays": _array(9, "I"), "a long array": (9, struct.pack("<IQ", 4, 2**62)),
    "array of 5,000": _array(4, "I", *range(5000)), "array of int64": _array(11, "q", -(2**63), 2**63 - 1),
}  # fmt: skip
"""Values of every type of GGUF, by name: the type and its bytes."""
_NUMBERS: Final = (0, 1, 2**31, 2**32 - 1)
_LARGE: Final = (0, 1, 7, 2**31, 2**62, 2**63, 2**64 - 1)


class GgufParts(NamedTuple):
    """The parts of a GGUF file: its entries, the descriptions of its tensors, and their numbers."""

    entries: list[tuple[str, bytes]]
    tensors: list[tuple[str, bytes]]
    data: bytes
    alignment: int

    @classmethod
    def of(cls, content: bytes, reader: Any) -> "GgufParts":
        """The parts of a file, by the package's reader of it."""

        def raw(field: Any) -> bytes:
            return content[field.offset : field.offset + sum(int(part.nbytes) for part in field.parts)]

        fields = [(name, raw(field)) for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        tensors = [(each.name, raw(each.field)) for each in reader.tensors]
        return cls(fields, tensors, content[reader.data_offset :], reader.alignment)

    def content(self) -> bytes:
        """The file."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries))
        head += b"".join(raw for _, raw in (*self.entries, *self.tensors))
        return head + bytes(-len(head) % self.alignment) + self.data


def gguf_damages(content: bytes, file: str) -> Iterator[Damage]:
    """A GGUF file in which one entry is another, and one in which one tensor is described otherwise."""
    parts = GgufParts.of(content, gguf.GGUFReader(file))
    for at, (name, raw) in enumerate(parts.entries):

        def other(*new: tuple[str, bytes], at: int = at) -> Callable[[], bytes]:
            return parts._replace(entries=[*parts.entries[:at], *new, *parts.entries[at + 1 :]]).content

        for made, value in GGUF_VALUES.items():
            yield Damage((name,), made, other((name, entry(name, value))))
        yield Damage((name,), "(left out)", other())
        yield Damage((name,), "(twice)", other((name, raw), (name, raw)))
        yield Damage((name,), "(without a name)", other(("", entry("", (8, text("x"))))))
    for at, (name, raw) in enumerate(parts.tensors):

        def told(*new: tuple[str, bytes], at: int = at) -> Callable[[], bytes]:
            return parts._replace(tensors=[*parts.tensors[:at], *new, *parts.tensors[at + 1 :]]).content

        start = len(text(name))
        (rank,) = struct.unpack_from("<I", raw, start)
        shape = struct.unpack_from(f"<{rank}Q", raw, start + 4)
        kind, offset = struct.unpack_from("<IQ", raw, start + 4 + 8 * rank)
        shapes = [(), (0,), (7,), (2**62,), (2**64 - 1,) * 4, (1,) * 5, (*shape, 2), shape[:-1], shape[::-1],
                  *((*shape[:-1], each) for each in _LARGE)]  # fmt: skip
        others = {f"of shape {each}": (each, kind, offset) for each in shapes}
        others |= {f"of type {each}": (shape, each, offset) for each in (*range(42), *_NUMBERS[2:])}
        others |= {f"at {each}": (shape, kind, each) for each in _LARGE}
        for made, (size, code, place) in others.items():
            described = text(name) + struct.pack(f"<I{len(size)}QIQ", len(size), *size, code, place)
            yield Damage((name,), made, told((name, described)))
        yield Damage((name,), "(left out)", told())
        yield Damage((name,), "(twice)", told((name, raw), (name, raw)))
        yield Damage((name,), "(named otherwise)", told(("x", text("x") + raw[start:])))
    for cut in (0, 3, 24, 100, len(content) // 2, len(content) - 1):
        yield Damage((), f"(its first {cut} bytes)", partial(content.__getitem__, slice(cut)))
