r"""The syntax of patterns of module paths: the part of regular expressions that configs of adapters are written in.

A pattern of it is matched by following all ways at once. What needs more, as ``(?=…)`` and ``\1``, is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MAX_DEPTH: Final = 32
"""Groups in groups."""
_MAX_KINDS: Final = 256
"""Characters, ranges and classes between [ and ]."""
_SPECIAL: Final = frozenset(r"\.^$*+?{}[]()|")
_CLASSES: Final[dict[str, Callable[[str], bool]]] = {
    "d": str.isdecimal,
    "D": lambda character: not character.isdecimal(),
    "s": str.isspace,
    "S": lambda character: not character.isspace(),
    "w": lambda character: character.isalnum() or character == "_",
    "W": lambda character: not (character.isalnum() or character == "_"),
}
"""Classes of characters after a backslash, as ``re`` has them for texts."""


class Unread(Exception):
    """A pattern is not read. The text is the reason."""


@dataclass(frozen=True)
class Character:
    """One character of some kind."""

    fits: Callable[[str], bool]


@dataclass(frozen=True)
class Edge:
    """A place without a character."""

    holds: Callable[[str, int], bool]
    """True at an index of a text."""


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """One of some parts."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """A part so many times; ``most`` None: without a limit."""

    part: "Node"
    least: int
    most: int | None


Node = Character | Edge | Sequence | Choice | Repeat
_START: Final = Edge(lambda text, at: at == 0)
_END: Final = Edge(lambda text, at: at == len(text) or (at == len(text) - 1 and text[at] == "\n"))
_ANY: Final = Character(lambda character: character != "\n")
_PLACES: Final[dict[str, Node]] = {"^": _START, "$": _END, ".": _ANY}


def parse(text: str) -> Node:
    """Return the parts of a pattern. Raises Unread."""
    return _PatternReader(text).read()


class _PatternReader:
    """Reads the text of a pattern from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> Node:
        """Return the whole pattern. Raises Unread."""
        node = self._choice(0)
        if self._at < len(self._text):
            raise Unread("has a ) without its (")
        return node

    def _takes(self, wanted: str) -> bool:
        """True if the text goes on with this, which is then taken."""
        if not self._text.startswith(wanted, self._at):
            return False
        self._at += len(wanted)
        return True

    def _next(self) -> str:
        if self._at == len(self._text):
            raise Unread("ends within a group, a class or after a backslash")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise Unread(f"has more than {_MAX_DEPTH} groups in groups")
        options = [self._sequence(depth)]
        while self._takes("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._part(depth)))
        return Sequence(tuple(parts))

    def _part(self, depth: int) -> Node:
        character = self._next()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return Character(self._class())
        if character == "\\":
            return self._escaped()
        if character in "^$.":
            return _PLACES[character]
        if character in _SPECIAL:
            raise Unread(f"has {character} where a name or a group is expected")
        return Character(character.__eq__)

    def _group(self, depth: int) -> Node:
        if self._takes("?P<"):
            while (letter := self._next()) != ">":
                if not (letter.isalnum() or letter == "_"):
                    raise Unread("has a group whose name has other characters than letters and digits")
        elif not self._takes("?:") and self._takes("?"):
            raise Unread(f"has (?{self._text[self._at : self._at + 1]}, which is not read")
        node = self._choice(depth + 1)
        if self._next() != ")":
            raise Unread("has a ( without its )")
        return node

    def _escaped(self) -> Node:
        character = self._next()
        if character in _CLASSES:
            return Character(_CLASSES[character])
        if character == "A":
            return _START
        if character == "Z":
            return Edge(lambda text, at: at == len(text))
        if character.isascii() and character.isalnum():
            raise Unread(rf"has \{character}, which is not read")
        return Character(character.__eq__)

    def _class(self) -> Callable[[str], bool]:
        excludes, kinds = self._takes("^"), [self._class_part()]
        while not self._takes("]"):
            kinds.append(self._class_part())
            if len(kinds) > _MAX_KINDS:
                raise Unread(f"has more than {_MAX_KINDS} characters between [ and ]")
        return lambda character: any(kind(character) for kind in kinds) is not excludes

    def _class_part(self) -> Callable[[str], bool]:
        low = self._class_character()
        if not (isinstance(low, str) and self._text.startswith("-", self._at)) or self._text.startswith("-]", self._at):
            return low.__eq__ if isinstance(low, str) else low
        self._at += 1
        high = self._class_character()
        if not isinstance(high, str) or high < low:
            raise Unread("has a class with a range that does not go up from one character to another")
        return lambda character: low <= character <= high

    def _class_character(self) -> str | Callable[[str], bool]:
        character = self._next()
        if character in "[]":
            raise Unread(f"has {character} in a class without a backslash")
        if character != "\\":
            return character
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character.isascii() and character.isalnum():
            raise Unread(rf"has \{character} in a class, which is not read")
        return character

    def _repeated(self, part: Node) -> Node:
        """The part with what follows it: ``*``, ``+``, ``?`` or numbers; ``?`` after these chooses the same paths."""
        if self._takes("*"):
            least, most = 0, None
        elif self._takes("+"):
            least, most = 1, None
        elif self._takes("?"):
            least, most = 0, 1
        elif self._takes("{"):
            least, most = self._numbers()
        else:
            return part
        if isinstance(part, Edge):
            raise Unread("repeats ^ or $")
        self._takes("?")
        if self._text.startswith(("*", "+", "?", "{"), self._at):
            raise Unread("has two repetitions beside each other")
        return Repeat(part, least, most)

    def _numbers(self) -> tuple[int, int | None]:
        content, closed, _ = self._text[self._at : self._at + 16].partition("}")
        low, comma, high = content.partition(",")
        if (
            not closed
            or not all(number.isascii() and number.isdecimal() for number in (low, high) if number)
            or not (low or high)
        ):
            raise Unread("has { without a number and }")
        self._at += len(content) + 1
        least = int(low or 0)
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise Unread("has numbers in { } that do not go up")
        return least, most
