"""Servers side by side: answers verified, then load in interleaved rounds."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np

from benchmarks.contestants import Entry, Server, serving
from benchmarks.load import Load, send
from benchmarks.processes import Running, ServerError, cores_for
from benchmarks.workloads import Workload

TOLERANCE = 1e-5
"""Largest error of an answer against float64, of the largest number of that answer: float32 leaves a tenth of it."""
DIFFERENT = 8
"""Requests that are verified, sent at once: a server that batches must give each caller its own."""
WARM_SECONDS = 1


@dataclass(frozen=True)
class Cell:
    """One entry at one concurrency: what each round found."""

    entry: Entry
    connections: int
    loads: list[Load] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Requests a second, by round."""
        return [load.rate for load in self.loads]

    def ratio(self, other: "Cell") -> float:
        """Return the median over rounds of the ratio of rates. A round without answers of the other is skipped."""
        return median([a / b for a, b in zip(self.rates, other.rates, strict=False) if b] or [math.nan])


@dataclass
class Comparison:
    """Measurements of one workload."""

    workload: Workload
    cells: list[Cell]
    faults: dict[str, str] = field(default_factory=dict)
    """Servers, or single entries, that could not be measured to the end, by name or label; and why."""

    def cell(self, name: str, form: str, connections: int) -> Cell | None:
        """The cell of an entry, if it was measured."""
        for cell in self.cells:
            if (cell.entry.name, cell.entry.form.name, cell.connections) == (name, form, connections):
                return cell if cell.loads else None
        return None

    def of(self, server: Server) -> list[Cell]:
        """Return the cells of a server that remain to be measured."""
        return [cell for cell in self.cells if cell.entry.server.name == server.name and not self.failed(cell.entry)]

    def failed(self, entry: Entry) -> bool:
        """Return True if the server has failed."""
        return bool({entry.server.name, entry.label} & self.faults.keys())

    @contextmanager
    def keeping(self, label: str) -> Iterator[None]:
        """Record a failure, which ends the rounds of this label alone."""
        try:
            yield
        except (ServerError, OSError, HTTPException, RuntimeError, ValueError) as fault:
            self.faults[label] = str(fault) or type(fault).__name__


def compare(
    workload: Workload, entries: Sequence[Entry], connections: Sequence[int], rounds: int, seconds: float, folder: Path
) -> Comparison:
    """Measure every entry at every concurrency in several rounds. Ours and the ceilings alternate at each."""
    found = Comparison(workload, [Cell(entry, count) for count in connections for entry in entries])
    kept = _servers(entries, peer=False)
    with ExitStack() as stack:
        started = {server.name: stack.enter_context(serving(server, workload, folder)) for server in kept}
        for server in kept:
            _prepare(found, server, started[server.name], folder)
        for index in range(rounds):
            for count in connections:
                cells = [cell for server in kept for cell in found.of(server) if cell.connections == count]
                # Each round begins with another one, so that none always follows the same neighbour.
                for cell in cells[index % len(cells) :] + cells[: index % len(cells)]:
                    cell.loads.append(_load(cell, started[cell.entry.server.name], workload, seconds, folder))
            for server in _servers(entries, peer=True):
                if found.of(server):
                    with found.keeping(server.name), serving(server, workload, folder) as process:
                        _prepare(found, server, process, folder)
                        for cell in found.of(server):
                            cell.loads.append(_load(cell, process, workload, seconds, folder))
    return found


def peak_bytes(workload: Workload, entry: Entry, connections: int, folder: Path) -> tuple[int, int]:
    """Return the peak resident bytes after the start, and after load on this many connections."""
    with serving(entry.server, workload, folder) as process:
        idle = process.peak_bytes()
        _load(Cell(entry, connections), process, workload, 2 * workload.seconds, folder)
        return idle, process.peak_bytes()


def _servers(entries: Sequence[Entry], *, peer: bool) -> list[Server]:
    return list({entry.server.name: entry.server for entry in entries if entry.server.peer == peer}.values())


def _prepare(found: Comparison, server: Server, process: Running, folder: Path) -> None:
    """Verify the server's answers, then let it run warm."""
    most = max(cell.connections for cell in found.of(server))
    for cell in [cell for cell in found.of(server) if cell.connections == most]:
        with found.keeping(cell.entry.label):
            verify(cell.entry, process.url, found.workload, min(DIFFERENT, most))
            _load(cell, process, found.workload, min(WARM_SECONDS, found.workload.seconds), folder)


def verify(entry: Entry, url: str, workload: Workload, count: int = DIFFERENT) -> None:
    """Send different requests at once and compare each answer with float64. Raises ServerError."""
    with ThreadPoolExecutor(count) as pool:
        errors = list(pool.map(lambda index: _error(entry, url, workload, index), range(count)))
    if max(errors) > TOLERANCE:
        raise ServerError(f"{entry.name} answers {entry.form.name} wrong, by {max(errors):.1g} of the largest number")


def _error(entry: Entry, url: str, workload: Workload, index: int) -> float:
    query = workload.query(index)
    request = entry.form.write(query)
    connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", request.path, request.body, request.headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ServerError(f"{entry.name} answers {entry.form.name} with {answer.status}: {body[:200]!r}")
    expected = workload.answer(query)
    output = entry.form.read(body, answer.getheader, query.shape)
    return float(np.abs(output - expected).max() / np.abs(expected).max())


def _load(cell: Cell, process: Running, workload: Workload, seconds: float, folder: Path) -> Load:
    requests = [cell.entry.form.write(workload.query(index)) for index in range(workload.different)]
    _, cores = cores_for(workload.cores)
    before = process.processor_seconds()
    found = send(process.url + requests[0].path, requests, cell.connections, seconds, cores, folder)
    computed = process.processor_seconds() - before
    process.rest()
    return replace(found, processor_seconds=computed)
