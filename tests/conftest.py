"""Fixtures that every test may use: seeded numbers, and one live server over real HTTP."""

import asyncio
import gc
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from tests.sampling import mark_unsampled

FoundT = TypeVar("FoundT")
HAS_TORCH = find_spec("torch") is not None


def pytest_configure(config: pytest.Config) -> None:
    """Trust a single authority: each new client reads them all, which takes 60 ms, and no test leaves the machine.

    Hypothesis limits no times, which a busy machine exceeds. No garbage is collected while tests are: almost nothing
    of what is imported and made then is garbage, and to look at it takes three seconds of each worker.
    """
    import certifi
    from hypothesis import HealthCheck, settings

    gc.disable()
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

    authority, end, _ = Path(certifi.where()).read_text("ascii").partition("-----END CERTIFICATE-----")
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 - closed at the end of the run
    config.add_cleanup(file.close)
    file.write(authority + end)
    file.flush()
    os.environ["SSL_CERT_FILE"] = file.name
    os.environ["ATTENTION_AUTOSTART"] = "false"  # no command of a test starts a server for want of one
    os.environ["ATTENTION_SPARE_MODEL_PROCESS"] = "false"  # five seconds of a processor in each server of a test


def pytest_collection_finish() -> None:
    """Leave what is imported, and the tests, out of every later collection of garbage, which took half a second.

    A machine's rates are measured once a process.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(700, 10, 100)  # what outlives two collections is looked at a tenth as often
    if torch_device := sys.modules.get("attention_service.runtime.device.torch_device"):
        torch_device.measure_rates = cache(torch_device.measure_rates)  # 40 ms, at each Device.open of a test
    for logger in logging.root.manager.loggerDict.values():  # pytest adds two handlers to each other one, in each phase
        logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Skip the files that need torch or what comes with the server, where only the base package is installed.

    With torch, a package that is missing is an error: `make test` installs all that its files import.
    """
    report = yield
    fault = report.call.excinfo and report.call.excinfo.value.__cause__
    if isinstance(fault, ModuleNotFoundError) and not HAS_TORCH:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {fault.name}")
    return report


@pytest.hookimpl(tryfirst=True)  # before ``-m`` leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is outside the samples slow, and skip what is marked ``gpu`` on a machine without one.

    No other code skips for want of a GPU.
    """
    mark_unsampled(items)
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files of a folder to one worker where they share a server that takes seconds to be ready."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder, _, file = nodeid.partition("::")[0].rpartition("/")
            return folder if folder.startswith("tests/api/doors/") else f"{folder}/{file}"

    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


def has_gpu() -> bool:
    """True on a machine with a CUDA device."""
    if not HAS_TORCH:
        return False
    import torch  # here, so that the process that hands tests to others starts without it

    return torch.cuda.is_available()


def eventually(look: Callable[[], FoundT], seconds: float = 60) -> FoundT:
    """The first true result of ``look``. Fails after so many seconds, which a fault takes, or a very busy machine."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)
    return found


def asker(engine: Any, question: str) -> Callable[..., Any]:
    """The method of an engine that answers a question: one of its own name, or ``ask``."""
    return getattr(engine, question, None) or partial(engine.ask, question)


@pytest.fixture
def rng() -> np.random.Generator:
    """Numbers that are the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine functions that are tests with asyncio."""
    return "asyncio"


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Lets a test set logging up; afterwards it is as before."""
    import structlog

    root, events = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**events)


@pytest.fixture
def started_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of models start as the service starts them, in seconds, not as copies of another."""
    from attention_service.models.server import worker_process

    monkeypatch.setattr(worker_process, "create_subprocess_exec", asyncio.create_subprocess_exec)


@contextmanager
def live_server(models_dir: Path, **settings: object) -> Iterator[str]:
    """The base URL of a server that runs in this process, on a free port, until the block ends.

    Its device's rates are those of one machine wherever it runs, so that what is chosen by predicted times is the same.
    It logs no requests unless ``log_level`` says so: their lines come late, and would stand between results of tests.
    """
    # Imported here: the tests of the contract and of the client run without the server's extra.
    pytest.importorskip("torch")
    import structlog

    from attention_service.api.app import create_app
    from attention_service.api.serving import DrainingServer
    from attention_service.models.server import worker_process
    from attention_service.settings import Settings
    from tests.forked_workers import rates, start_forked

    if not has_gpu():  # CUDA does not outlive a fork
        worker_process.create_subprocess_exec = start_forked
    # Events go to logging, which writes warnings alone, to standard error: a test may read standard output.
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    usual = {"_env_file": None, "models_dir": models_dir, "calibrate": False, "log_level": "warning"}
    app = create_app(Settings(**usual | settings))
    server = DrainingServer(app, timeout_graceful_shutdown=5)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    scheme = "https" if "ssl_certfile" in settings else "http"
    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with patch("attention_service.runtime.device.torch_device.measure_rates", rates):
            thread.start()
            _wait_until_ready(url, thread)
        yield url
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def _wait_until_ready(url: str, thread: threading.Thread) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and thread.is_alive():
        try:
            if httpx.get(f"{url}/health/ready", verify=False).status_code == 200:  # noqa: S501
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the server did not become ready")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a live server that all tests of a run share: use module names of your own."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    with live_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def http(server: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of that server: what a caller in any language has."""
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    """The service's own client of that server, which the tests of a file share."""
    from attention_client import Client

    with Client(server) as client:
        yield client


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Run coroutines on one event loop. ``asyncio.Runner`` would write out each reply, to see who handles signals."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()
