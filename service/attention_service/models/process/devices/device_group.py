"""The processes of the other devices, as the first one has them: started, told what to do, watched, ended with it.

The processes wait for each other in their passes, and nobody is to wait for ever. So a process tells of each order that
failed in it, and one that fails in some processes alone ends the group, as does the end of any process.
"""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from io import FileIO
from subprocess import Popen
from typing import IO, Any, Final, NoReturn, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore

from attention_service.models.worker_messages import Piece, WorkerMessage, pieces_of, read_message

T = TypeVar("T")
HOST: Final = "127.0.0.1"
_NETWORK: Final = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
"""The network by which the processes of one machine meet, whatever its name resolves to."""
_TIMEOUT: Final = timedelta(hours=2)
"""The longest time that a process waits in a pass for another; a group that stands still is ended long before."""
_APART_S: Final = 20.0
"""Seconds within which an order that failed in one process fails in the others too."""
_LOOK_S: Final = 1.0
"""Seconds between two looks whether one did."""
STATUS: Final = 70
"""The exit status of a group that ended itself."""


class DeviceGroup:
    """The followers of the first process."""

    def __init__(self, followers: Sequence[Popen[bytes]], devices: Sequence[str], facts: dict[str, Any]) -> None:
        """Have the process of each further device load its part of the model by these facts of ``load``."""
        store = TCPStore(HOST, 0, len(devices), is_master=True, wait_for_workers=False)
        self._changed = threading.Condition()
        self._faults: dict[int, dict[int, str]] = {}
        """The faults of orders in other processes, by order and rank."""
        self._told = 0.0
        """Time of the last of them, in ``time.monotonic``."""
        self._order = 0
        self._within: int | None = None
        """The order that this process is carrying out."""
        self._sinks: list[IO[bytes]] = []
        self._sources: list[FileIO] = []
        seed = secrets.randbits(63)
        for rank, (device, follower) in enumerate(zip(devices[1:], followers, strict=True), 1):
            if follower.stdin is None or follower.stdout is None:
                raise TypeError("a process was started without pipes")
            self._sinks.append(follower.stdin)
            self._sources.append(FileIO(os.dup(follower.stdout.fileno()), "r"))
            own = {"device": device, "rank": rank, "port": store.port, "seed": seed}
            self._send(pieces_of("load", facts | own), self._sinks[-1:])
        join_group(devices[0], 0, len(devices), store, seed)

    def await_loaded(self) -> None:
        """Wait until the others have loaded their parts; call it once this one has.

        From then on the end of one of them ends this process.
        """
        for rank, source in enumerate(self._sources, 1):
            message = read_message(source)
            if message is None or message.kind != "loaded":
                end_group(f"the process of device {rank} did not load its part of the model")
            threading.Thread(target=self._listen, args=(rank, source), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def order(self, kind: str, facts: dict[str, Any], body: Sequence[Piece], step: Callable[[WorkerMessage], T]) -> T:
        """Have all processes take a step, and take it here. Returns and raises what the step does here."""
        order = self._order = self._order + 1
        facts = facts | {"order": order}
        with self._changed:
            self._within = order
        self._send(pieces_of(kind, facts, body), self._sinks)
        try:
            result = step(WorkerMessage(kind, facts, memoryview(b"".join(body))))
        except Exception as fault:
            self._await_faults(order, f"{type(fault).__name__}: {fault}")
            raise
        with self._changed:
            self._within = None
            self._end_if_apart(order)
        return result

    def _await_faults(self, order: int, fault: str) -> None:
        """Wait until an order that failed here has failed in all processes."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._faults.get(order, ())) == len(self._sinks), _APART_S):
                end_group(f"a step failed on the first device and not on all others ({fault})")
            del self._faults[order]
            self._within = None

    def _listen(self, rank: int, source: FileIO) -> None:
        """Take in the faults that a process tells of, until its end."""
        while (message := read_message(source)) is not None:
            order = message.facts["order"]
            with self._changed:
                self._faults.setdefault(order, {})[rank] = message.facts["reason"]
                self._told = time.monotonic()
                self._changed.notify_all()
                if self._within != order:
                    self._end_if_apart(order)
        end_group(f"the process of device {rank} ended")

    def _watch(self) -> None:
        """End the group if an order goes on here long after it has failed in another process."""
        while True:
            time.sleep(_LOOK_S)
            with self._changed:
                if self._within in self._faults and time.monotonic() - self._told > _APART_S:
                    self._end_if_apart(self._within)

    def _end_if_apart(self, order: int) -> None:
        """End the group if an order has failed in other processes, and has not here."""
        if faults := self._faults.get(order):
            end_group("; ".join(f"a step failed on device {rank} alone ({reason})" for rank, reason in faults.items()))

    def _send(self, pieces: Sequence[Piece], sinks: Sequence[IO[bytes]]) -> None:
        try:
            for sink in sinks:
                sink.writelines(pieces)
                sink.flush()
        except OSError:
            end_group("the process of a device ended")


def join_group(device: str, rank: int, devices: int, store: Store, seed: int) -> None:
    """Make this process the one of a device, and wait for those of the others. ``seed``: of all that they draw."""
    for name, value in _NETWORK.items():
        os.environ.setdefault(name, value)
    torch.manual_seed(seed)
    place = torch.device(device)
    os.environ["LOCAL_RANK"] = str(place.index or 0)  # by which transformers takes a GPU
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=devices, timeout=_TIMEOUT)


def end_group(reason: str) -> NoReturn:
    """End this process, which leads a group, and with it the others; the server starts all again."""
    sys.stderr.write(f"{reason}; all processes of the model are ended\n")
    sys.stderr.flush()
    os._exit(STATUS)
