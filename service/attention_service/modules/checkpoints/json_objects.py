"""JSON objects of a checkpoint's files: what no other reader could take is refused here, in words for a message."""

import json
import re
from pathlib import Path
from typing import Any, Final

from attention_service.modules.store_files import read_regular, reason

_DEEPEST: Final = 64
"""Levels of lists and objects in each other."""
_DIGITS: Final = 300
"""The most digits of an integer: a float holds what has as many."""
_INDEX_DIGITS: Final = 9
"""The most digits of a key that is a number."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half a character outside of Unicode's first plane. Alone it is no text, and cannot be sent."""


class UnreadableJson(ValueError):
    """The reason for which a text is no JSON object here, such as ``is not a JSON object``."""


def read_object(file: Path, limit: int) -> dict[str, Any]:
    """The object in a regular file of at most so many bytes. Raises UnreadableJson, also for a file that is none."""
    try:
        content = read_regular(file, limit)
    except OSError as fault:
        raise UnreadableJson(f"cannot be read: {reason(fault)}") from fault
    return json_object(content)


def json_object(content: bytes) -> dict[str, Any]:
    """The object of a text. Raises UnreadableJson."""
    try:
        value = json.loads(content, parse_int=_integer)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UnreadableJson("is not a JSON object")
    if content.count(b"[") + content.count(b"{") > _DEEPEST and _is_deeper(value, _DEEPEST):
        raise UnreadableJson(f"has more than {_DEEPEST} lists and objects in each other")
    if _SURROGATE.search(content) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UnreadableJson("has a text with half a character (a surrogate alone)") from None
    return value


def index_of(key: str) -> int | None:
    """The number that a key of an object stands for; None for any other text."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= _INDEX_DIGITS else None


def _integer(digits: str) -> int | float:
    """An integer; infinity for one that no float holds, as Python reads 1e400."""
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _is_deeper(value: Any, levels: int) -> bool:
    """True if there are lists or objects in each other on more levels."""
    layer = [value]
    for _ in range(levels):
        inner = [container.values() if isinstance(container, dict) else container for container in layer]
        layer = [member for values in inner for member in values if isinstance(member, dict | list)]
        if not layer:
            return False
    return True
