"""An event loop whose clock jumps to the next timer when nothing else can run: tests of waits take no time."""

import asyncio
import selectors


class _Jumping(selectors.DefaultSelector):
    """Waits for files without a limit of time; a limit is over at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        self.now += 0.0 if found else timeout or 0.0
        return found


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Serves timers and files, not threads."""

    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


FAKE_CLOCK = "asyncio", {"loop_factory": FakeClockLoop}
"""The value of the fixture ``anyio_backend`` for a module whose tests wait for timers alone."""
