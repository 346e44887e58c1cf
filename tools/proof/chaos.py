"""Faults brought about on purpose: ``python -m tools.proof.chaos``. Exits with 1 if a promise was broken.

Each experiment has a server of its own, over HTTP: kills while writers change modules, a disk that takes no more, more
callers than the server has room for, and callers that do not read their answers.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import psutil
from benchmarks.processes import ROOT, Running, ServerError, free_port
from benchmarks.tables import table

from attention_client import Client
from tools.proof.servers import serving

CONFIG = {"d_model": 8, "num_heads": 2, "bias": False}
SCALE = ROOT / "deploy" / "scale"
_CHECKED_S = 2.0
"""Seconds in which HAProxy finds a process that is ready again."""
HEALTH_MS, UNREAD_MIB = 250, 512
"""Limits: the 99th percentile of health's latency under overload, with its callers on the same cores; the memory that
unread replies may take beside a budget of as much."""


@dataclass
class Outcome:
    """The figures of one experiment, and the promises that it found broken."""

    done: str
    figures: str = ""
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: object, otherwise: str) -> None:
        """Note a promise that does not hold."""
        if not holds:
            self.broken.append(otherwise)


def module(seed: int) -> dict[str, object]:
    """Return parameters that tell their seed."""
    return {f"{role}_proj.weight": [[float(seed)] * 8] * 8 for role in "qkvo"}


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """One writer of one module. It knows the last acknowledged state, and the one that it asked for since."""

    def __init__(self, name: str) -> None:
        self.name, self.kept, self.sent = name, None, None
        self.acknowledged = 0

    def write(self, url: str, rng: random.Random) -> None:
        """Create, replace or delete until the server is gone. None stands for a module that is not there."""
        with httpx.Client(base_url=url, timeout=20) as http, suppress(httpx.TransportError):
            while True:
                self.sent = None if self.kept is not None and rng.random() < 0.2 else rng.randrange(2**20)
                if self.sent is None:
                    answer = http.delete(f"/v1/modules/{self.name}")
                elif self.kept is None:
                    body = {"name": self.name, "config": CONFIG, "parameters": module(self.sent)}
                    answer = http.post("/v1/modules", json=body)
                else:
                    answer = http.put(f"/v1/modules/{self.name}/parameters", json={"parameters": module(self.sent)})
                answer.raise_for_status()
                self.kept = self.sent
                self.acknowledged += 1

    def verify(self, http: httpx.Client) -> bool:
        """True if the module is as it was acknowledged, or as it was asked for when the server died."""
        answer = http.get(f"/v1/modules/{self.name}/parameters/q_proj.weight")
        found = None if answer.status_code == 404 else int(answer.json()["value"][0][0])
        right = found in {self.kept, self.sent}
        self.kept = self.sent = found
        return right


def kills(folder: Path, rounds: int) -> Outcome:
    """Kill the server with SIGKILL at random times while four writers change modules, and start it again."""
    outcome, rng = Outcome(f"{rounds} kills while 4 writers create, replace and delete"), random.Random(1)
    writers, lost, slowest = [Writer(f"writer-{index}") for index in range(4)], 0, 0.0
    for _ in range(rounds):
        with serving(folder) as server:
            with httpx.Client(base_url=server.url, timeout=20) as http:
                lost += sum(not writer.verify(http) for writer in writers)
            with ThreadPoolExecutor(len(writers)) as threads:
                writing = [threads.submit(writer.write, server.url, random.Random(rng.random())) for writer in writers]
                time.sleep(rng.uniform(0.1, 1.0))
                server.process.send_signal(signal.SIGKILL)
                for each in writing:
                    each.result()
    started = time.monotonic()
    with serving(folder) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        slowest = time.monotonic() - started
        lost += sum(not writer.verify(http) for writer in writers)
        left = [path.name for path in (folder / "models" / "modules").rglob("*") if "tmp" in path.suffix]
    acknowledged = sum(writer.acknowledged for writer in writers)
    outcome.figures = f"{acknowledged:,} acknowledged writes, {lost} lost, ready again in {slowest:.1f} s"
    outcome.expect(not lost, f"{lost} acknowledged writes are lost")
    outcome.expect(acknowledged, "no write was acknowledged")
    outcome.expect(not left, f"temporary files are left: {left}")
    return outcome


# ── kills of one of two processes ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Load:
    """Callers of a proxy before two processes, and what they found."""

    url: str
    ended: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def write(self, index: int) -> None:
        """Replace a module again and again. Either process answers for each acknowledged version at once."""
        with Client(self.url, retries=100, timeout=120) as client:
            client.modules.create(f"written{index}", CONFIG, seed=0)
            for seed in itertools.count(1):
                if self.ended.is_set():
                    return
                made = client.modules.replace_parameters(f"written{index}", module(1000 * index + seed))
                client.forward(f"written{index}", np.ones((1, 8), np.float32), version=made.version)
                self.counts["writes"] += 1

    def decode(self, index: int) -> None:
        """Step through sequences; each output equals that of one pass."""
        x = np.random.default_rng(index).standard_normal((1, 12, 8)).astype(np.float32)
        with Client(self.url, retries=100, timeout=120) as client:
            whole = client.forward("decoder", x).output
            while not self.ended.is_set():
                with client.sessions.open("decoder") as session:
                    outputs = [session.step(x[:, i : i + 1]).output for i in range(12)]
                    self.counts["replays"] += session.replays
                self._expect(np.allclose(np.concatenate(outputs, 1), whole, atol=1e-5), "a session's outputs are wrong")
                self._expect(np.array_equal(client.forward("decoder", x).output, whole), "a forward pass is wrong")
                self.counts["steps"] += 12

    def _expect(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.faults.append(otherwise)


def haproxy() -> str | None:
    """Where HAProxy is. Debian has it where only root looks."""
    return shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


def servers_of(ports: Sequence[int]) -> str:
    """HAProxy's second file, as serve.sh writes it for processes at these ports."""
    lines = "".join(f"    server attention{port} 127.0.0.1:{port} CHECK\n" for port in ports)
    checked, unchecked = lines.replace("CHECK", "check"), lines.replace("CHECK", "no-check")
    return f"backend attention from processes\n{checked}backend unchecked from processes\n{unchecked}"


def one_of_two(folder: Path, rounds: int) -> Outcome:
    """Kill one of two processes behind HAProxy again and again, under load, and start it anew."""
    outcome, rng = Outcome(f"{rounds} kills of one of 2 processes under HAProxy, 4 callers go on"), random.Random(2)
    if (program := haproxy()) is None:
        return Outcome("", "", ["needs HAProxy: apt-get install haproxy"])
    proxy, *ports = (free_port() for _ in range(3))
    servers = folder / "servers.cfg"
    servers.write_text(servers_of(ports))
    command = [program, "-db", "-q", "-f", str(SCALE / "haproxy.cfg"), "-f", str(servers)]
    slots = [ExitStack() for _ in ports]

    def start(slot: int) -> Running:
        return slots[slot].enter_context(serving(folder, ports[slot], replicas=2))

    with ExitStack() as stack:
        for slot in slots:
            stack.push(slot)
        running = [start(slot) for slot in range(2)]
        environment = os.environ | {"ATTENTION_PORT": str(proxy)}
        proxying = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        stack.callback(proxying.terminate)
        load = Load(f"http://127.0.0.1:{proxy}")
        time.sleep(_CHECKED_S)
        with Client(load.url, retries=100) as client:
            spec = {"masks": [{"name": "causal"}]}
            client.modules.create("decoder", {**CONFIG, "spec": spec}, seed=1)
        with ThreadPoolExecutor(4) as threads:
            callers = [threads.submit(work, index) for index in range(2) for work in (load.write, load.decode)]
            try:
                for _ in range(rounds):
                    time.sleep(rng.uniform(0.1, 1.0))
                    victim = rng.randrange(2)
                    running[victim].process.send_signal(signal.SIGKILL)
                    slots[victim].close()
                    running[victim] = start(victim)
                    time.sleep(_CHECKED_S)
            finally:
                load.ended.set()
            for each in callers:
                outcome.broken += [repr(each.exception())] if each.exception() else []
    outcome.broken += load.faults
    counts = load.counts
    outcome.figures = (
        f"{counts['writes']:,} acknowledged writes read back, {counts['steps']:,} steps right, "
        f"{counts['replays']} sessions replayed"
    )
    outcome.expect(counts["replays"], "no session was lost: nothing was tried")
    return outcome


# ── a full disk ──────────────────────────────────────────────────────────────────────────────────────────────────────


def full_disk(folder: Path, _: int) -> Outcome:
    """Let the system refuse the server's writes beyond some bytes, and then take them again."""
    outcome = Outcome("the disk takes files of up to 1 KiB alone (RLIMIT_FSIZE), then any")
    statuses: Counter[int] = Counter()
    with serving(folder) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"name": "kept", "config": CONFIG, "parameters": module(1)}
        http.post("/v1/modules", json=body).raise_for_status()
        for limit, expected in ((1024, False), (resource.RLIM_INFINITY, True)):
            hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
            for seed in range(10):
                parameters = {"parameters": {name: [[2.0] * 8] * 8 for name in module(seed)}}
                answers = [
                    http.put("/v1/modules/kept/parameters", json=parameters),
                    http.post("/v1/modules", json=body | {"name": f"new-{seed}"}),
                ]
                for answer in answers:
                    statuses[answer.status_code] += 1
                    outcome.expect(answer.is_success == expected, f"a write gave {answer.status_code}")
                    if not answer.is_success:
                        is_problem = answer.headers.get("content-type") == "application/problem+json"
                        outcome.expect(is_problem and answer.status_code in {500, 503, 507}, f"{answer.text[:200]}")
            found = http.get("/v1/modules/kept/parameters/q_proj.weight").json()["value"][0][0]
            outcome.expect(found == (2.0 if expected else 1.0), f"the module holds {found} after the refusals")
            forward = http.post("/v1/modules/kept/forward", json={"query": [[1.0] * 8]})
            outcome.expect(forward.is_success, "a module in memory no longer answers")
        listed = len(http.get("/v1/modules").json()["modules"])
    outcome.expect(listed == 11, f"{listed} modules are there; expected 11")
    outcome.figures = f"answers: {error_statuses(statuses)}; the old version stays, reads go on, later writes succeed"
    return outcome


# ── overload ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def pressed(url: str, connections: int, seconds: float) -> tuple[Counter[int], list[float]]:
    """Return the statuses of requests from many connections, and the latencies of health meanwhile, in ms."""
    statuses: Counter[int] = Counter()
    latencies: list[float] = []
    until = time.monotonic() + seconds
    body = json.dumps({"query": [[0.5] * 8] * 64}).encode()
    head = "POST /v1/modules/busy/forward HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    host, port = httpx.URL(url).host, httpx.URL(url).port

    async def call() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            while time.monotonic() < until:
                writer.write(request)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length")
                )
                await reader.readexactly(length)
                statuses[int(answer.split()[1])] += 1
                if not answer.startswith(b"HTTP/1.1 200"):
                    await asyncio.sleep(0.05)
        except (ConnectionError, asyncio.IncompleteReadError):
            statuses[0] += 1
        finally:
            writer.close()

    async def look() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            while time.monotonic() < until:
                started = time.monotonic()
                (await http.get("/health/live")).raise_for_status()
                latencies.append(1000 * (time.monotonic() - started))
                await asyncio.sleep(0.02)

    await asyncio.gather(look(), *(call() for _ in range(connections)))
    return statuses, sorted(latencies)


def overload(folder: Path, rounds: int) -> Outcome:
    """Send from 16 and then from 600 connections, and look at health meanwhile."""
    seconds = max(rounds / 2, 2.0)
    outcome = Outcome(f"16 and then 600 connections at once, {seconds:.0f} s each")
    with serving(folder) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        http.post("/v1/modules", json={"name": "busy", "config": CONFIG}).raise_for_status()
        few, _ = asyncio.run(pressed(server.url, 16, seconds))
        many, health = asyncio.run(pressed(server.url, 600, seconds))
        held = http.get("/v1").json()["memory"]["in_flight_bytes"]
    slow = health[int(0.99 * (len(health) - 1))]
    outcome.figures = (
        f"{few[200] / seconds:,.0f}/s, then {many[200] / seconds:,.0f}/s ({error_statuses(many)}); "
        f"health 99 % within {slow:.0f} ms"
    )
    outcome.expect(set(few) == {200}, f"16 connections got {error_statuses(few)}")
    outcome.expect(set(many) <= {0, 200, 429, 503} and many[200], f"600 connections got {error_statuses(many)}")
    outcome.expect(slow < HEALTH_MS, f"health took {slow:.0f} ms; at most {HEALTH_MS} are allowed")
    outcome.expect(not held, f"{held} bytes are still in flight")
    return outcome


# ── slow readers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_readers(folder: Path, rounds: int) -> Outcome:
    """Ask for 60 large replies and read none of them, while another caller goes on."""
    outcome = Outcome(f"60 replies of 31 MiB that nobody reads, on a budget of {UNREAD_MIB} MiB")
    body = json.dumps({"query": [[1.0]], "key": [[1.0]], "value": [[1.0] * 2**21]}).encode()
    head = b"POST /v1/attention/forward HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    with serving(folder, memory_budget=f"{UNREAD_MIB}MiB") as server:
        process = psutil.Process(server.process.pid)
        before, most, slowest = process.memory_info().rss, 0, 0.0
        port = int(server.url.rsplit(":", 1)[1])
        readers = []
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for _ in range(60):
                readers.append(socket.create_connection(("127.0.0.1", port), timeout=60))
                with suppress(OSError):
                    readers[-1].sendall(request)
                started = time.monotonic()
                answer = http.get("/health/live")
                slowest = max(slowest, time.monotonic() - started)
                outcome.expect(answer.is_success, f"health gave {answer.status_code}")
                most = max(most, process.memory_info().rss)
            time.sleep(min(rounds / 5, 2))
            most = max(most, process.memory_info().rss) - before
            for each in readers:
                each.close()
            held = _settled(lambda: http.get("/v1").json()["memory"]["in_flight_bytes"])
            again = http.post("/v1/attention/forward", json={"query": [[1.0]]})
    outcome.figures = (
        f"+{most / 2**20:,.0f} MiB at most, {held} bytes in flight after they left; "
        f"health within {1000 * slowest:.0f} ms"
    )
    outcome.expect(most <= 2 * UNREAD_MIB * 2**20, f"memory grew by {most / 2**20:,.0f} MiB")
    outcome.expect(not held, f"{held} bytes are still in flight")
    outcome.expect(again.is_success, f"a request afterwards gave {again.status_code}")
    return outcome


def _settled(number: Callable[[], int]) -> int:
    deadline = time.monotonic() + 20
    while (found := number()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def error_statuses(statuses: Counter[int]) -> str:
    """Counts by status, as text; 0 stands for a connection that was closed."""
    return ", ".join(f"{status or 'closed'}: {count:,}" for status, count in sorted(statuses.items()))


EXPERIMENTS: dict[str, Callable[[Path, int], Outcome]] = {
    "kills": kills, "one of two": one_of_two, "full disk": full_disk, "overload": overload,
    "slow readers": slow_readers,
}  # fmt: skip


def chaos(names: list[str], rounds: int) -> int:
    """Do experiments, print a table of their figures, and return the number of broken promises."""
    print(table(["experiment", "what is done", "figures", "result"], [], 4), flush=True)
    broken = 0
    for name in names:
        with TemporaryDirectory() as folder:
            try:
                outcome = EXPERIMENTS[name](Path(folder), rounds)
            except (ServerError, httpx.HTTPError, subprocess.SubprocessError) as fault:
                outcome = Outcome("", "", [f"{type(fault).__name__}: {fault}"])
        result = "; ".join(dict.fromkeys(outcome.broken)) or "held"
        print(f"| {name} | {outcome.done} | {outcome.figures} | {result} |", flush=True)
        broken += len(outcome.broken)
    return broken


def main() -> int:
    """Do the experiments, and return the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("experiments", nargs="*", default=[], metavar="experiment", help=", ".join(EXPERIMENTS))
    made.add_argument("--rounds", type=int, default=20, help="kills, and seconds of overload")
    options = made.parse_args()
    unknown = set(options.experiments) - set(EXPERIMENTS)
    if unknown:
        made.error(f"there is no experiment {sorted(unknown)}; expected some of {', '.join(EXPERIMENTS)}")
    return int(bool(chaos(options.experiments or list(EXPERIMENTS), options.rounds)))


if __name__ == "__main__":
    sys.exit(main())
