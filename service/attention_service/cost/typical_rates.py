"""Typical rates of each kind of work, relative to the device's own rates: the first predictions of a device.

The file was measured at length, on one processor, by ``python -m benchmarks.typical``. Factors learned from
requests that run correct what differs on another processor.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("typical_rates.json")


@cache
def typical(kind: str) -> Mapping[str, float]:
    """Logarithms by feature, as those of curves, for ``cpu`` or ``cuda``; empty if none are known."""
    logs: dict[str, float] = json.loads(PATH.read_text("utf-8")).get(kind, {})
    return logs
