"""Patterns of module paths, as the configs of adapters have them: regular expressions that cannot backtrack.

Files bring them. Python's ``re`` tries one way after the other: a pattern such as ``(a+)+$`` takes a time that doubles
with each character of a path, and no other thread runs meanwhile. Here all ways are followed at once, so a path takes
at most as many steps as it has characters, times the length of the pattern (Thompson 1968).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from attention_service.modules.checkpoints.pattern_syntax import (
    Character,
    Choice,
    Edge,
    Node,
    Repeat,
    Sequence,
    Unread,
    parse,
)

_MAX_CHARACTERS: Final = 2**18
"""Characters of all patterns of one entry: several times those of a name for each matrix of a large model."""
_MAX_INSTRUCTIONS: Final = 2**16
"""Instructions of all patterns of one entry, with every copy of a part that is repeated by numbers."""
_MAX_STEPS: Final = 2**24
"""Steps of all paths through the patterns of one entry; a plain name takes one."""
_ADVICE: Final = r"write names of modules, or the ends of their paths with . [ ] ( | ) * + ? { } ^ $ \d \w \."


class UnreadPattern(Exception):
    """A pattern is not read. The text names it, and says why."""


@dataclass(frozen=True)
class _Fork:
    """Instruction: go on at each of these instructions."""

    targets: tuple[int, ...]


_Instruction = Character | Edge | _Fork


@dataclass
class ModulePatterns:
    r"""The patterns of one entry of a config. The first that a path ends with, after a dot, is that of the path.

    This is the choice of peft: ``re.match(rf"(.*\.)?({pattern})$", path)``.
    """

    entry: str
    """The name of the entry."""
    patterns: tuple[str, ...]
    steps: int = 0
    """Steps that were taken until now."""
    _programs: list["_Name | _Program"] = field(init=False)

    def __post_init__(self) -> None:
        """Read the patterns. Raises UnreadPattern."""
        characters = sum(map(len, self.patterns))
        if characters > _MAX_CHARACTERS:
            raise UnreadPattern(
                f"its {self.entry} has {characters} characters of patterns, of {_MAX_CHARACTERS} at most"
            )
        writer = _Writer()
        self._programs = []
        for pattern in self.patterns:
            try:
                self._programs.append(_Name.of(pattern) or _Program(writer.program(pattern)))
            except Unread as why:
                raise self._unread(pattern, str(why)) from None

    def first(self, path: str) -> str | None:
        """Return the first pattern of a path. Raises UnreadPattern if all paths together take too many steps."""
        for pattern, program in zip(self.patterns, self._programs, strict=True):
            fits, steps = program.match(path, _MAX_STEPS - self.steps)
            self.steps += steps
            if self.steps > _MAX_STEPS:
                raise self._unread(pattern, f"needs more than {_MAX_STEPS} steps with all others")
            if fits:
                return pattern
        return None

    def _unread(self, pattern: str, reason: str) -> UnreadPattern:
        return UnreadPattern(f"its {self.entry} has the pattern {pattern[:80]!r}, which {reason}; {_ADVICE}")


@dataclass(frozen=True)
class _Name:
    """A pattern that is the end of a path. A dot without a backslash is any character, as in every pattern."""

    characters: tuple[str | None, ...]
    """None: any."""

    @classmethod
    def of(cls, pattern: str) -> "_Name | None":
        """Read a pattern; None for one that is more than a name."""
        marked = pattern.replace(r"\.", "/")
        if "/" in pattern or not all(character.isalnum() or character in "._-/" for character in marked):
            return None
        return cls(tuple({".": None, "/": "."}.get(character, character) for character in marked))

    def match(self, path: str, _: int) -> tuple[bool, int]:
        """Return True if a path ends with the name, and the steps that this took."""
        start = len(path) - len(self.characters)
        if start < 0 or (start > 0 and path[start - 1] != "."):
            return False, 1
        return all(character in (None, path[start + at]) for at, character in enumerate(self.characters)), 1


@dataclass(frozen=True)
class _Program:
    """A pattern as instructions. After the last one, the pattern has been found."""

    instructions: tuple[_Instruction, ...]

    def match(self, path: str, allowed: int) -> tuple[bool, int]:
        """Return True if a path fits, and the steps that this took. It stops after more than are allowed."""
        reached = self._reach([0], path, 0)
        steps = len(reached)
        for at, character in enumerate(path):
            if not reached or len(self.instructions) in reached or steps > allowed:
                break
            fitting = [
                place + 1 for place in reached
                if isinstance(step := self.instructions[place], Character) and step.fits(character)
            ]  # fmt: skip
            reached = self._reach(fitting, path, at + 1)
            steps += len(reached)
        return len(self.instructions) in reached, steps

    def _reach(self, begun: Iterable[int], path: str, at: int) -> set[int]:
        """All instructions that are reached from some without a character."""
        left = [*begun]
        reached = set(left)
        while left:
            index = left.pop()
            step = self.instructions[index] if index < len(self.instructions) else None
            if isinstance(step, _Fork):
                targets = step.targets
            else:
                targets = (index + 1,) if isinstance(step, Edge) and step.holds(path, at) else ()
            for target in targets:
                if target not in reached:
                    reached.add(target)
                    left.append(target)
        return reached


class _Writer:
    """Writes the instructions of the patterns of one entry, one after the other."""

    def __init__(self) -> None:
        self._written = 0
        """Nodes and instructions of all patterns: repeats of nothing have no instructions."""

    def program(self, pattern: str) -> tuple[_Instruction, ...]:
        """Return the instructions of the next pattern. Raises Unread."""
        self._instructions: list[_Instruction] = []
        self._write(parse(rf"(.*\.)?({pattern})$"))
        return tuple(self._instructions)

    def _write(self, node: Node) -> None:
        self._count()
        if isinstance(node, Character | Edge):
            self._instructions.append(node)
        elif isinstance(node, Sequence):
            for part in node.parts:
                self._write(part)
        elif isinstance(node, Choice):
            self._write_choice(node)
        else:
            self._write_repeat(node)

    def _count(self) -> None:
        self._written += 1
        if self._written > _MAX_INSTRUCTIONS:
            raise Unread(f"is too long: all patterns have more than {_MAX_INSTRUCTIONS} parts, repetitions included")

    def _write_choice(self, node: Choice) -> None:
        fork, begun, ended = self._reserve(), [], []
        for option in node.options:
            begun.append(len(self._instructions))
            self._write(option)
            ended.append(self._reserve())
        self._instructions[fork] = _Fork(tuple(begun))
        for place in ended:
            self._instructions[place] = _Fork((len(self._instructions),))

    def _write_repeat(self, node: Repeat) -> None:
        for _ in range(node.least):
            self._write(node.part)
        if node.most is None:
            fork = self._reserve()
            self._write(node.part)
            self._instructions.append(_Fork((fork,)))
            self._instructions[fork] = _Fork((fork + 1, len(self._instructions)))
            return
        forks = []
        for _ in range(node.most - node.least):
            forks.append(self._reserve())
            self._write(node.part)
        for place in forks:
            self._instructions[place] = _Fork((place + 1, len(self._instructions)))

    def _reserve(self) -> int:
        self._count()
        self._instructions.append(_Fork(()))
        return len(self._instructions) - 1
