"""Requests a second by the Open Inference Protocol, beside the native ones of the same server, over HTTP.

``python -m benchmarks.protocols`` prints the tables; ``--output benchmarks/results/protocols.md`` writes them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import forms
from benchmarks.contestants import OURS, SERVICE, Entry
from benchmarks.load import generator
from benchmarks.page import fewer, parser, publish
from benchmarks.rounds import Comparison, compare
from benchmarks.tables import short, spread, table
from benchmarks.workloads import WORKLOADS, Workload

TEXT = """One module, self-attention, float32, the same numbers in the same server. Server and load generator
({generator}) have a core each. {rounds} rounds of {seconds:g} s, in which the forms take turns: rates are medians with
the least and the largest; the ratio is the median of the ratios within a round, to the native form of the same kind.
`processor µs` is what the server computed for a request.
"""
SERVER = replace(SERVICE, environment={"ATTENTION_OIP": "true"})
ROUNDS, SECONDS = 9, 1.0


def entries(module: str) -> list[tuple[Entry, Entry]]:
    """Each form of the protocol, beside its native one."""
    pairs = (
        (forms.v2_binary(module), forms.ours(module, forms.SAFETENSORS)),
        (forms.v2_json(module), forms.ours(module, forms.JSON)),
    )
    return [(Entry(OURS, SERVER, form), Entry(OURS, SERVER, native)) for form, native in pairs]


def section(workload: Workload, found: Comparison) -> Iterator[str]:
    """The table of one workload."""
    yield f"## {workload.name}: {workload.text}\n"
    rows = []
    for connections in sorted({cell.connections for cell in found.cells}):
        for pair in entries(workload.name):
            beside = found.cell(OURS, pair[1].form.name, connections)
            for entry in pair:
                cell = found.cell(OURS, entry.form.name, connections)
                if cell is None or beside is None:
                    continue
                p50 = short(median(load.p50_ms for load in cell.loads))
                ratio = f"{cell.ratio(beside):.2f}" if cell is not beside else ""
                each = short(median(1e6 * load.processor_seconds / max(load.requests, 1) for load in cell.loads))
                rows.append([str(connections), entry.form.name, spread(cell.rates), ratio, p50, each])
    yield table(["c", "form", "requests/s", "of native", "p50 ms", "processor µs"], rows, left=2) + "\n"
    for name, reason in found.faults.items():
        yield f"{name} could not be measured: {reason}\n"


def measured(names: str, rounds: int, seconds: float, folder: Path) -> Iterator[str]:
    """The tables, as they are found."""
    for name in names.split(","):
        workload = WORKLOADS[name]
        listed = [entry for pair in entries(name) for entry in pair]
        found = compare(workload, listed, workload.concurrency[:2], rounds, seconds, folder)
        yield "\n".join(section(workload, found))


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS)
    options.add_argument("--workload", default="W1,W2", help="of W1, W2, W3; default: W1,W2")
    options.add_argument("--seconds", type=float, default=SECONDS, help="of one run of the load generator")
    arguments = options.parse_args()
    rounds = arguments.rounds or (fewer(ROUNDS) if arguments.quick else ROUNDS)
    text = TEXT.format(generator=generator(), rounds=rounds, seconds=arguments.seconds)
    with TemporaryDirectory() as folder:
        publish(
            "Protocols", text, measured(arguments.workload, rounds, arguments.seconds, Path(folder)), arguments.output
        )


if __name__ == "__main__":
    main()
