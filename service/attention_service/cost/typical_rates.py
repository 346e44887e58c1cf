"""Typical rates of each kind of work, relative to the device's own rates: the prior of a calibration.

The file was measured at length, on one processor, by ``python -m benchmarks.typical``. A minute's calibration of
another processor needs only the difference from it, and predicts rare work as well as common work (a prior from earlier
data: Gelman et al. 2013, chapter 5).
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
