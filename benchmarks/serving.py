"""Requests a second and their times, over HTTP: this project's server beside the ceilings and, if asked, its peers.

``python -m benchmarks.serving --quick --workload W1 --concurrency 1,16`` prints tables; ``--output FILE`` writes them.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.contestants import BATCHING, ORJSON, OURS, UNBATCHED, Entry, Setup, calibration, entries
from benchmarks.load import generator
from benchmarks.processes import cores_for, pinned
from benchmarks.rounds import Cell, Comparison, compare, peak_bytes
from benchmarks.tables import provenance, short, spread, table
from benchmarks.workloads import WORKLOADS, Workload

HEAD = """# Served

{provenance}

One module, self-attention, float32. Each server has the same weights, and its answers were held against float64 before
it was timed. Server and load generator ({generator}) have a core each; for W3 they share two. {rounds} rounds of
{seconds}, in which the servers take turns: rates are medians with the least and the largest, ratios medians of the
ratios within a round, `p50` and `p99` medians of those of each round. {calibrated}

`bare ASGI` has no validation, admission, metrics, request ids or errors; it is what uvicorn and torch can do at most.
"""
CALIBRATED = (
    "`attention serve` runs with its defaults; the device was calibrated before, as it is in the first idle minute."
)
NOT_CALIBRATED = "`attention serve` runs with its defaults, before the first calibration of the device."


def main() -> None:
    """Measure, print, write."""
    options = _options().parse_args()
    rounds = options.rounds or (3 if options.quick else 11)
    workloads = [WORKLOADS[name] for name in options.workload.split(",")]
    calibrated = options.calibrated or not options.quick
    told = f"{options.seconds:g} s" if options.seconds else "a second (W3: four)"
    pages = [
        HEAD.format(
            provenance=provenance(), generator=generator(), rounds=rounds, seconds=told,
            calibrated=CALIBRATED if calibrated else NOT_CALIBRATED,
        )
    ]  # fmt: skip
    with TemporaryDirectory() as name:
        folder = Path(name)
        for cores in {workload.cores for workload in workloads} if calibrated else ():
            calibrate(next(workload for workload in workloads if workload.cores == cores), folder)
        for workload in workloads:
            connections = options.concurrency or workload.concurrency
            chosen = [
                entry
                for entry in entries(workload.name)
                if options.forms in (None, "json" if entry.form.text else "bytes")
            ]
            found = compare(workload, chosen, connections, rounds, options.seconds or workload.seconds, folder)
            pages.append("\n".join(section(found)))
            print(pages[-1], flush=True)
            if workload.name == "W3" and not options.quick:
                pages.append("\n".join(memory(workload, chosen, folder)))
                print(pages[-1], flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(pages), "utf-8")


def _options() -> argparse.ArgumentParser:
    def counts(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="of W1, W2, W3; default: all")
    parser.add_argument("--concurrency", type=counts, help="connections, as in 1,16,64; default: the workload's own")
    parser.add_argument("--forms", choices=("bytes", "json"), help="default: both")
    parser.add_argument("--rounds", type=int, help="default: 11, with --quick 3")
    parser.add_argument("--seconds", type=float, help="of one run of the load generator; default: 1, for W3 4")
    parser.add_argument("--quick", action="store_true", help="few rounds, no calibration unless --calibrated")
    parser.add_argument("--calibrated", action="store_true", help="calibrate the device first, for at most a minute")
    parser.add_argument("--output", type=Path, help="the page to write")
    return parser


def calibrate(workload: Workload, folder: Path) -> None:
    """Measure the device on the server's cores, once for all its starts."""
    cores, _ = cores_for(workload.cores)
    command = calibration(Setup(workload, folder, 0, folder))
    subprocess.run(pinned(command, cores), check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)


def section(found: Comparison) -> Iterator[str]:
    """The tables of one workload."""
    yield f"## {found.workload.name}: {found.workload.text}\n"
    for title, text, ceilings in (
        ("Bytes", False, (UNBATCHED, BATCHING)),
        ("JSON", True, (ORJSON,)),
    ):
        cells = [cell for cell in found.cells if cell.entry.form.text is text and cell.loads]
        if cells:
            head = [f"of {name.removeprefix('bare ASGI, ')}" for name in ceilings]
            head = ["c", "server", "form", "requests/s", *head, "p50 ms", "p99 ms", "p99 / p50", "failed"]
            cells.sort(key=lambda cell: (cell.connections, -median(cell.rates)))
            yield f"### {found.workload.name}, {title}\n"
            yield table(head, (_row(found, cell, ceilings) for cell in cells), left=3) + "\n"
    for name, reason in found.faults.items():
        yield f"{name} could not be measured: {reason}\n"


def _row(found: Comparison, cell: Cell, ceilings: Sequence[str]) -> list[str]:
    p50 = median(load.p50_ms for load in cell.loads)
    p99 = median(load.p99_ms for load in cell.loads)
    ratios = []
    for name in ceilings:
        form = "JSON" if cell.entry.form.text else "raw"
        ceiling = found.cell(name, form, cell.connections)
        ratios.append(f"{cell.ratio(ceiling):.2f}" if ceiling else "")
    name = f"**{cell.entry.name}**" if cell.entry.name == OURS else cell.entry.name
    return [
        str(cell.connections), name, cell.entry.form.name, spread(cell.rates), *ratios, short(p50), short(p99),
        f"{p99 / p50:.1f}" if p50 else "", str(sum(load.failed for load in cell.loads) or ""),
    ]  # fmt: skip


def memory(workload: Workload, chosen: Sequence[Entry], folder: Path) -> Iterator[str]:
    """Peak resident memory of each server, started anew."""
    connections = max(workload.concurrency)
    yield f"### {workload.name}, most resident memory (VmHWM), c = {connections}\n"
    rows = []
    for entry in chosen:
        idle, peak = peak_bytes(workload, entry, connections, folder)
        rows.append([entry.name, entry.form.name, f"{idle / 2**20:.0f}", f"{peak / 2**20:.0f}"])
    yield table(["server", "form", "MiB after the start", "MiB after load"], rows, left=2) + "\n"


if __name__ == "__main__":
    main()
