"""Run tests in processes that are forked once all are collected: ``pytest -p tools.forked_tests --forks 3``.

Collection imports PyTorch, Transformers and every file of tests, and rewrites the assertions of a fresh checkout. It
takes 16 to 40 seconds of a processor, which workers that collect for themselves (pytest-xdist) would each spend again.

A worker takes a file at a time from a pipe, runs its tests, and sends their reports. The parent hands the reports to
pytest's plugins, as if it had run the tests. If a worker dies, the test that it was at has failed, and another one
goes on after it.

While a fresh checkout is collected, another process collects its later half, and so compiles it on a core of its own.
"""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # what asks the driver for GPUs cannot use them after a fork

_FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
_FOLDERS_OF_ONE_SERVER = "tests/api/doors/"
"""The files of each folder in it share a server, which takes seconds to be ready."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the number of workers."""
    parser.addoption("--forks", type=int, default=0, help="run the tests in as many forked processes (0: in this one)")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect the tests. Where nothing is compiled, the later half of the files is compiled meanwhile."""
    folder = session.config.rootpath / "tests"
    fresh = folder.exists() and not (folder / "__pycache__").exists()
    if not (session.config.option.forks and fresh and _FORK):
        return (yield)
    files = sorted(map(str, folder.rglob("test_*.py")))
    other = _FORK.Process(target=_compile, args=(session, files[len(files) // 2 :]), daemon=True)
    other.start()
    try:
        return (yield)
    finally:
        other.terminate()
        other.join()


def _compile(session: pytest.Session, files: list[str]) -> None:
    """Collect files in a forked process, which writes their bytecode."""
    with _apart(session.config):
        session.perform_collect(files)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in forked processes. None: pytest runs them itself, or says why none runs."""
    options = session.config.option
    forks = min(options.forks, len(files := _by_file(session.items)))
    if forks < 1 or session.testsfailed or options.collectonly or options.usepdb or _FORK is None:
        return None
    session.config._tmp_path_factory.getbasetemp()  # the parent of the workers' folders, which this process removes
    workers = _Workers(session, files)
    try:
        workers.run(forks)
    finally:
        workers.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def _by_file(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each file, or folder of one server; those with most tests first, so that the last are short."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        key = file.rpartition("/")[0] if file.startswith(_FOLDERS_OF_ONE_SERVER) else file
        groups.setdefault(key, []).append(item)
    return sorted(groups.values(), key=len, reverse=True)


class _Workers:
    """The forked processes of a run, and the pipe with the numbers of the files that none has taken."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]]) -> None:
        self._session, self._files = session, files
        self._waiting, writer = os.pipe()
        os.write(writer, b"".join(number.to_bytes(4, "big") for number in range(len(files))))  # less than a pipe holds
        os.close(writer)
        self._processes: dict[Connection, BaseProcess] = {}
        self._left: dict[Connection, list[pytest.Item]] = {}  # what each has taken and not ended
        self._count = 0

    def run(self, forks: int) -> None:
        """Return once all tests have run, or a limit of failures is reached."""
        for _ in range(forks):
            self._fork([])
        while self._processes:
            for connection in wait(list(self._processes)):
                try:
                    self._take(connection, *connection.recv())
                except EOFError:
                    self._has_ended(connection)
            if self._session.shouldfail or self._session.shouldstop:
                return
        if self._count < len(self._session.items):
            raise self._session.Failed(f"{len(self._session.items) - self._count} tests were not run")

    def end(self) -> None:
        """End the workers that still run."""
        for connection, process in self._processes.items():
            process.terminate()
            process.join()
            connection.close()
        os.close(self._waiting)

    def _fork(self, first: list[pytest.Item]) -> None:
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_work, args=(self._session, theirs, self._taken(first, theirs)))
        process.start()
        theirs.close()
        self._processes[ours], self._left[ours] = process, [*first]

    def _taken(self, first: list[pytest.Item], connection: Connection) -> Iterator[pytest.Item]:
        """These tests, and those of every file that this process takes from the pipe."""
        yield from first
        while taken := os.read(self._waiting, 4):
            number = int.from_bytes(taken, "big")
            connection.send(("taken", number))
            yield from self._files[number]

    def _take(self, connection: Connection, kind: str, sent: Any) -> None:
        """Hand on what a worker sent."""
        hook, config = self._session.config.hook, self._session.config
        if kind == "taken":
            self._left[connection] += self._files[sent]
        elif kind == "ended":
            self._end_first(connection)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=sent)
        else:
            report = hook.pytest_report_from_serializable(config=config, data=sent)
            hook.pytest_runtest_logreport(report=report)

    def _end_first(self, connection: Connection) -> None:
        item = self._left[connection].pop(0)
        self._count += 1
        self._session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _has_ended(self, connection: Connection) -> None:
        """If the worker died in a test, report this, and go on with the next one in another worker."""
        process, left = self._processes[connection], self._left[connection]
        process.join()
        if left:
            said = f"the process of the test ended with {process.exitcode}"
            report = pytest.TestReport(left[0].nodeid, left[0].location, {}, "failed", said, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
            self._end_first(connection)
            self._fork(left)
        del self._processes[connection]
        connection.close()


class _Sender:
    """The plugin of a worker that sends what the parent's plugins are to be told."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._connection.send(("ended", nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        told = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", told))


def _work(session: pytest.Session, connection: Connection, items: Iterator[pytest.Item]) -> None:
    """Run tests in a forked process."""
    config = session.config
    folders = config._tmp_path_factory  # pytest has no public way to give a worker a folder of its own
    folders._basetemp = folders.mktemp("worker")
    with _apart(config):
        config.pluginmanager.register(_Sender(config, connection))
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # fixtures that it does not need end with this test
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following


@contextmanager
def _apart(config: pytest.Config) -> Iterator[None]:
    """Capture what this process prints apart from what others do, and let pytest print nothing."""
    if capture := config.pluginmanager.getplugin("capturemanager"):
        capture.stop_global_capturing()
        capture.start_global_capturing()
    if terminal := config.pluginmanager.getplugin("terminalreporter"):
        config.pluginmanager.unregister(terminal)
    try:
        yield
    finally:
        if capture:
            capture.stop_global_capturing()
