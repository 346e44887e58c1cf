"""The latest end of a stopping server: a thread that waits for ever, as for a file of a dead disk, cannot keep it.

Python ends a process only when its threads have ended: at the end of the event loop, of pools of threads and of the
interpreter it waits for them without a limit. What was acknowledged is on the disk by then, so nothing is lost.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import psutil

log = logging.getLogger(__name__)
STOP_S: Final = 5.0
"""Seconds from the end of the drain to that of the process: models take two to end, and orchestrators allow ten."""
_TELL_S: Final = 1.0
"""Seconds for the last line of the log; whoever reads the log may have stopped too."""


class StopLimit:
    """Ends this process and all that it has started at a time, whatever its threads wait for."""

    def __init__(self, status: Callable[[], int]) -> None:
        """``status`` gives the exit status."""
        self._status = status
        # A signal may come at any instruction: only this queue takes something in while it takes something in.
        self._limits: SimpleQueue[float] = SimpleQueue()
        threading.Thread(target=self._wait, name="attention-stop", daemon=True).start()

    def end_within(self, seconds: float) -> None:
        """End the process after so many seconds from now, unless an earlier call has set an earlier time."""
        self._limits.put(time.monotonic() + seconds)

    def _wait(self) -> None:
        end = self._limits.get()
        with suppress(Empty):
            while True:
                end = min(end, self._limits.get(timeout=max(end - time.monotonic(), 0)))
        try:
            telling = threading.Thread(target=_tell, daemon=True)
            telling.start()
            telling.join(_TELL_S)
            end_children()
        finally:
            os._exit(self._status())


def _tell() -> None:
    waiting = ", ".join(_waiting_threads())
    log.warning("the server ends although some of its threads have not: %s", waiting)
    sys.stderr.flush()


def _waiting_threads() -> list[str]:
    """The threads for which Python would wait, each with the function in which it is."""
    frames = sys._current_frames()
    waiting = []
    for thread in threading.enumerate():
        if not thread.daemon and thread.ident in frames:
            code = frames[thread.ident].f_code
            waiting.append(f"{thread.name} in {code.co_qualname} ({Path(code.co_filename).name})")
    return waiting


def end_children() -> None:
    """End all that this process has started, at once."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
