"""How long the steps of one request may take."""

import math
import time
from collections.abc import Mapping

import httpx


class Allowance:
    """httpx's timeouts of a request (``connect``, ``read``, ``write``, ``pool``), and a moment by which it has to end.

    That moment is the extension ``deadline``, in seconds of ``time.monotonic``; transports that do not know it pass it
    over.
    """

    __slots__ = ("_deadline", "_timeouts")

    def __init__(self, request: httpx.Request) -> None:
        self._timeouts: Mapping[str, float | None] = request.extensions.get("timeout", {})
        self._deadline: float = request.extensions.get("deadline", math.inf)

    def seconds(self, step: str, waited: float = 0.0) -> float | None:
        """What is left for a step that has waited so long, 0 where nothing is; None where it may take any time."""
        own = self._timeouts.get(step)
        if own is not None:
            own -= waited
        if self._deadline != math.inf:
            left = self._deadline - time.monotonic()
            own = left if own is None or left < own else own
        return own if own is None or own > 0 else 0.0
