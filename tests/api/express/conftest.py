"""A server of their own for the tests of express, and what tells which way a request went."""

import threading

import httpx
import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attention_service.api import app as app_module
from attention_service.api.connection import Connection
from attention_service.api.express import Express
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.scheduling.execution import Execution
from tests.api.express.talk import CONFIGS, ask, body_of, introduce
from tests.api.talk import post
from tests.conftest import live_server


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    """A server with a module of each config, of width 8 with 2 heads; and its express."""
    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app_module, "Express", lambda *given: made.append(Express(*given)) or made[-1])
        with live_server(tmp_path_factory.mktemp("models")) as url:
            with httpx.Client(base_url=url) as http:
                for name, more in CONFIGS.items():
                    post(http, "/v1/modules", name=name, config={"d_model": 8, "num_heads": 2} | more, seed=1)
            yield url, made[0]


@pytest.fixture
def url(served):
    """The URL of that server; express remembers nothing of former tests."""
    url, express = served
    express._known.clear()
    express._vain.clear()
    return url


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture
def taken(monkeypatch):
    """Of each forward request, whether express answered it or it went the ordinary way: noted before it is answered."""
    seen, answer, ordinary = [], Connection.answer, Connection._make_scope

    def answered(self, *given):
        seen.append(True)
        answer(self, *given)

    def went(self):
        if b"/forward" in self.url:
            seen.append(False)
        ordinary(self)

    monkeypatch.setattr(Connection, "answer", answered)
    monkeypatch.setattr(Connection, "_make_scope", went)
    return seen


@pytest.fixture
def waits(monkeypatch):
    """What express began to answer."""
    seen = []
    for name in ("take", "again"):
        real = getattr(Express, name)
        monkeypatch.setattr(Express, name, lambda self, *given, real=real: seen.append(real(self, *given)) or seen[-1])
    return seen


@pytest.fixture
def parsed(monkeypatch):
    """What the parser was given."""
    seen, real = [], HttpToolsProtocol.data_received
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda self, data: seen.append(data) or real(self, data))
    return seen


@pytest.fixture
def three(http, rng):
    """Three requests that express knows, and their answers."""
    bodies = [body_of(rng.standard_normal((1, 4, 8)).astype(np.float32)) for _ in range(3)]
    introduce(http, "plain", bodies[0])
    answers = [ask(http, "plain", body) for body in bodies]
    return bodies, answers


@pytest.fixture
def gate(monkeypatch):
    """Holds up every pass, on the device's thread, until it is opened."""
    opened, real = threading.Event(), Forward.launch
    opened.begun = []

    def run(self, uploaded):
        opened.begun.append(self.bound.batch)
        assert opened.wait(20)
        return real(self, uploaded)

    monkeypatch.setattr(Forward, "launch", run)
    monkeypatch.setattr(Execution, "_stays", lambda *_: False)
    yield opened
    opened.set()


@pytest.fixture
def engines(monkeypatch):
    """The engines of servers that are started from here on."""
    made = []
    monkeypatch.setattr(app_module, "Engine", lambda *given: made.append(Engine(*given)) or made[-1])
    return made
