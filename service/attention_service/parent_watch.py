"""The end of a server whose parent has ended: the program that started it for itself, and that may have been killed."""

import os
import threading
import time
from typing import Final

from attention_service.api.stop_limit import end_children

_LOOK_S: Final = 0.5


def end_with_parent(pid: int) -> None:
    """Watch the parent in a thread, and end this process and all that it has started when the parent has ended.

    A process whose parent ends gets another one, on Linux and on macOS. What was acknowledged is on the disk by then.
    """
    threading.Thread(target=_watch, args=(pid,), name="attention-parent", daemon=True).start()


def _watch(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(_LOOK_S)
    try:
        end_children()
    finally:
        os._exit(1)
