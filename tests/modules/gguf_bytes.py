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


def gguf(*entries):
    """A file of a Llama with these entries and no tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1 + len(entries))
    return head + entry("general.architecture", (8, text("llama"))) + b"".join(entries)
