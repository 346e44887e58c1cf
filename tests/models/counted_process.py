"""The process of a model that counts the functions of the project that each request enters.

``done``, the last message about a request, brings the counts, as a list of file, function and count.
"""

import sys
import threading
from typing import Any

from tests.passed_functions import PassedFunctions

from attention_service.models.process import __main__, process_pipes, turns

passed = PassedFunctions()
send = process_pipes.ProcessPipes.send


def send_counts(pipes: process_pipes.ProcessPipes, kind: str, *rest: Any, **options: Any) -> None:
    """Send a message, and with the last one of a request the counts since that of the request before."""
    if kind == "done":
        facts, *body = rest
        rest = ({**facts, "passed": [[*place, count] for place, count in passed.fresh().items()]}, *body)
    send(pipes, kind, *rest, **options)


if __name__ == "__main__":
    process_pipes.ProcessPipes.send = send_counts  # type: ignore[method-assign]
    threading.setprofile(passed.see)
    sys.setprofile(passed.see)
    turns.serve(__main__.ServedModel.load, __main__.warm)
