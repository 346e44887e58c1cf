"""GGUF files written byte by byte, with whatever a header may claim."""

import struct


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def strings(values):
    """An array of texts: its type and its bytes."""
    return 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def entry(name, value):
    """An entry; ``value``: its type and its bytes."""
    kind, raw = value
    return text(name) + struct.pack("<I", kind) + raw


def tensor(name, kind, shape, offset=0):
    """The entry of a tensor. ``kind``: the number of its type; ``offset``: bytes before it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def gguf(*entries, tensors=(), size=0):
    """A file of a Llama with these entries and these of tensors, for which there are ``size`` bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + len(entries))
    whole = head + entry("general.architecture", (8, text("llama"))) + b"".join(entries) + b"".join(tensors)
    return whole + bytes(-len(whole) % 32 + size)
