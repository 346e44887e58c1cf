"""Processes of models that begin as copies of a process that has imported transformers.

A start takes 0.05 s of a processor in place of the seconds of the imports. ``tests/models/loaded/test_whole_models.py``
starts processes as the service does.
"""

import asyncio
import fcntl
import multiprocessing
import os
import runpy
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from attention_service.cost import Rates
from attention_service.runtime.device import torch_device

_FORKS = multiprocessing.get_context("forkserver")
_ONE_AT_A_TIME = threading.RLock()
"""Held by the thread that starts or reaps a process: several servers may run, each in its own thread."""


class Forked:
    """The part of ``asyncio.subprocess.Process`` that the service uses."""

    def __init__(self, process: BaseProcess, stdin: asyncio.StreamWriter, stderr: asyncio.StreamReader) -> None:
        self.stdin, self.stderr, self.pid, self.kill = stdin, stderr, process.pid, process.kill
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._code: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(process.sentinel, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        with _ONE_AT_A_TIME:
            self._process.join()
        self._code.set_result(self._process.exitcode)

    async def wait(self) -> int | None:
        """Return the exit code once the process has ended."""
        return await asyncio.shield(self._code)


class _ClosedAtTheEnd(asyncio.StreamReaderProtocol):
    """Closes a connection once the other side has."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def start_forked(
    *command: str, env: Mapping[str, str], stdout: int, pass_fds: Sequence[int], **more: Any
) -> Forked | asyncio.subprocess.Process:
    """Start ``python -m module``, where ``command`` ends with the module, in place of ``create_subprocess_exec``.

    A process with arguments, as that of a model over several devices, starts as the service starts it.
    """
    if "--spread" in command:
        return await asyncio.create_subprocess_exec(*command, env=env, stdout=stdout, pass_fds=pass_fds, **more)
    await asyncio.to_thread(_begin, env)
    ours, theirs = socket.socketpair()  # for standard input and standard error
    passed = {number: Connection(os.dup(number)) for number in pass_fds}
    streams = (theirs, Connection(os.dup(stdout)), theirs)
    process = _FORKS.Process(target=_run, args=(command[-1], dict(env), streams, passed), daemon=True)
    with _ONE_AT_A_TIME:
        process.start()
    theirs.close()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, protocol = await loop.create_connection(lambda: _ClosedAtTheEnd(reader), sock=ours)
    return Forked(process, asyncio.StreamWriter(transport, protocol, reader, loop), reader)


def _begin(environment: Mapping[str, str]) -> None:
    """Start the process that imports, with the variables of those that it becomes, and wait until it has."""
    with _ONE_AT_A_TIME:
        _begin_once(tuple(environment.items()))


@cache
def _begin_once(environment: Sequence[tuple[str, str]]) -> None:
    _FORKS.set_forkserver_preload(["tests.warm_process"])
    with patch.dict(os.environ, environment):
        first = _FORKS.Process(target=int)
        first.start()
        first.join()


def _run(module: str, environment: Mapping[str, str], streams: Sequence[Any], passed: Mapping[int, Any]) -> None:
    """Run a module with these standard streams, and files under the numbers that they have in the server."""
    places = dict(enumerate(streams)) | dict(passed)
    kept = {place: fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, max(places) + 1) for place, file in places.items()}
    for place, file in kept.items():
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules.pop(module, None)  # it runs as ``__main__``
    torch_device.measure_rates = rates
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def rates(_: object) -> Rates:
    """The rates of one machine, wherever tests run: the same is chosen by them, and no time goes by to measure them."""
    return Rates(flops_per_s=1.8e11, bytes_per_s=4.7e10, overhead_s=3.1e-5)
