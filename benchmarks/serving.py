"""Requests a second and their times, over HTTP: this project's server beside the ceilings and, if asked, its peers.

``python -m benchmarks.serving --quick --workload W1 --concurrency 1,16`` prints tables; ``--output FILE`` writes them.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.contestants import BATCHING, ORJSON, OURS, UNBATCHED, Entry, entries
from benchmarks.load import generator
from benchmarks.page import publish
from benchmarks.peers import entries as peers
from benchmarks.rounds import Cell, Comparison, compare, peak_bytes
from benchmarks.tables import short, spread, table
from benchmarks.workloads import WORKLOADS, Workload

TEXT = """One module, self-attention, float32. Each server has the same weights, and its answers were held against
float64 before it was timed. Server and load generator ({generator}) have a core each; for W3 they share two. {rounds}
rounds of {seconds}, in which the servers take turns: rates are medians with the least and the largest, ratios medians
of the ratios within a round, `p50` and `p99` medians of those of each round, `processor µs` what the server computed
for a request. `attention serve` runs with its defaults, but does not learn times.

`bare ASGI` has no validation, admission, metrics, request ids or errors; it is what uvicorn and torch can do at most.
"""
PEERS = """
Other servers ({versions}) compute the same attention by the same calls as the bare ones. Each is started for its turn
in every round, since most keep busy while nobody asks, and runs with the settings that served it best.
"""


def main() -> None:
    """Measure, print, write."""
    options = _options().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the cleanup that stops the servers
    with TemporaryDirectory() as folder:
        publish("Served", _text(options), measured(options, Path(folder)), options.output)


def measured(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The sections, as they are found."""
    workloads = [WORKLOADS[name] for name in options.workload.split(",")]
    for workload in workloads:
        chosen = entries(workload.name)
        if options.peers is not None:
            chosen += peers.entries([name for name in options.peers.split(",") if name])
        chosen = [entry for entry in chosen if options.form in (None, "json" if entry.form.text else "bytes")]
        connections = options.concurrency or workload.concurrency
        found = compare(workload, chosen, connections, _rounds(options), options.seconds or workload.seconds, folder)
        yield "\n".join(section(found))
        if workload.name == "W3" and not options.quick:
            yield "\n".join(memory(workload, [entry for entry in chosen if not entry.server.peer], folder))


def _text(options: argparse.Namespace) -> str:
    text = TEXT.format(
        generator=generator(), rounds=_rounds(options),
        seconds=f"{options.seconds:g} s" if options.seconds else "a second (W3: four)",
    )  # fmt: skip
    return text if options.peers is None else text + PEERS.format(versions=peers.versions())


def _rounds(options: argparse.Namespace) -> int:
    return int(options.rounds or (3 if options.quick else 11 if options.peers is None else 5))


def _options() -> argparse.ArgumentParser:
    def counts(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="of W1, W2, W3; default: all")
    parser.add_argument("--concurrency", type=counts, help="connections, as in 1,16,64; default: the workload's own")
    parser.add_argument("--form", choices=("bytes", "json"), help="default: both")
    parser.add_argument("--rounds", type=int, help="default: 11, with --peers 5, with --quick 3")
    parser.add_argument("--seconds", type=float, help="of one run of the load generator; default: 1, for W3 4")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--peers", nargs="?", const="", help="other servers too: all, or those of these names")
    parser.add_argument("--output", type=Path, help="the page to write")
    return parser


def section(found: Comparison) -> Iterator[str]:
    """The tables of one workload."""
    yield f"## {found.workload.name}: {found.workload.text}\n"
    for title, text, ceilings in (
        ("Bytes", False, (UNBATCHED, BATCHING)),
        ("JSON", True, (ORJSON,)),
    ):
        cells = [cell for cell in found.cells if cell.entry.form.text is text and cell.loads]
        if cells:
            ratios = [f"of {name.removeprefix('bare ASGI, ')}" for name in ceilings]
            times = ["p50 ms", "p99 ms", "p99 / p50", "processor µs", "failed"]
            cells.sort(key=lambda cell: (cell.connections, -median(cell.rates)))
            rows = [_row(found, cell, ceilings) for cell in cells]
            yield f"### {found.workload.name}, {title}\n"
            yield table(["c", "server", "form", "requests/s", *ratios, *times], rows, left=3) + "\n"
    for name, reason in found.faults.items():
        yield f"{name} could not be measured: {reason}\n"


def _row(found: Comparison, cell: Cell, ceilings: Sequence[str]) -> list[str]:
    p50 = median(load.p50_ms for load in cell.loads)
    p99 = median(load.p99_ms for load in cell.loads)
    each = median(1e6 * load.processor_seconds / max(load.requests, 1) for load in cell.loads)
    ratios = []
    for name in ceilings:
        form = "JSON" if cell.entry.form.text else "raw"
        ceiling = found.cell(name, form, cell.connections)
        ratios.append(f"{cell.ratio(ceiling):.2f}" if ceiling else "")
    name = f"**{cell.entry.name}**" if cell.entry.name == OURS else cell.entry.name
    return [
        str(cell.connections), name, cell.entry.form.name, spread(cell.rates), *ratios, short(p50), short(p99),
        f"{p99 / p50:.1f}" if p50 else "", short(each), str(sum(load.failed for load in cell.loads) or ""),
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
