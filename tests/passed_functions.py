"""Counts of the functions of the project that a thread enters, as a profiler of ``sys.setprofile`` sees them."""

from collections import Counter
from types import FrameType

Calls = Counter[tuple[str, str]]
"""Calls by file and function."""


class PassedFunctions:
    """The project's functions that threads enter, by file and name."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}
        self._calls: Calls = Counter()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; a generator counts each time that it goes on."""
        if event != "call":
            return
        code = frame.f_code
        file = self._files.setdefault(code.co_filename, code.co_filename.partition("/attention_")[2] or None)
        if file is not None:
            self._calls[file, code.co_qualname] += 1

    def fresh(self) -> Calls:
        """Return the counts since the call before, and begin new ones."""
        calls, self._calls = self._calls, Counter()
        return calls
