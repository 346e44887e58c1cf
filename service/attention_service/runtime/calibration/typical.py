"""What each kind of work usually takes, beside what a device's rates alone would say: where a calibration begins.

The file was measured at length, on one processor, by ``python -m benchmarks.typical``. A minute's calibration of
another has then to find how that one differs, and tells what it hardly came by as well as what it met often (a prior
from earlier data: Gelman et al. 2013, chapter 5).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("typical.json")


@cache
def typical(kind: str) -> Mapping[str, float]:
    """Logarithms by feature, as those of curves, for ``cpu`` or ``cuda``; none where none are known."""
    logs: dict[str, float] = json.loads(PATH.read_text("utf-8")).get(kind, {})
    return logs
