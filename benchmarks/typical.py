"""Typical times of each kind of work, measured at length. Predictions start from them.

``python -m benchmarks.typical`` writes the file that the server brings along. To be run anew where terms come to mean
other work, on a machine with nothing else to do.
"""

import argparse
import json
from time import perf_counter

from attention_service.cost.typical_rates import PATH
from attention_service.runtime.device.torch_device import Device, measure_rates
from benchmarks.curve_fitting import Point, fit
from benchmarks.measured_requests import Bench

ROOM = 2**31
DIGITS = 3


def measured(device: Device, seconds: float, seed: int) -> dict[str, float]:
    """Logarithms of curves, by feature."""
    rates = measure_rates(device.torch)
    bench = Bench(device, rates, ROOM, seed)
    points: list[Point] = []
    started = perf_counter()
    while perf_counter() - started < seconds:
        if (point := bench.next()) is not None:
            points.append(point)
    print(f"{len(points)} requests")
    return {name: round(log, DIGITS) for name, log in sorted(fit(points, rates).curves.logs.items())}


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0, help="of measuring (default: 900)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logs = measured(Device.open("cpu", 1), options.seconds, options.seed)
    PATH.write_text(json.dumps({"cpu": logs}, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
