"""Both clients, and waits between attempts that a test can afford."""

import pytest

from attention_client import retry
from tests.client.service import Played


@pytest.fixture(params=["sync", "async"])
def kind(request):
    """Name one of the two clients."""
    return request.param


@pytest.fixture
def played():
    """Make a played service that answers at once."""
    return Played()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Wait milliseconds instead of tenths of seconds."""
    monkeypatch.setattr(retry, "WAIT_INITIAL", 0.001)
    monkeypatch.setattr(retry, "WAIT_JITTER", 0.001)
    monkeypatch.setattr(retry, "WAIT_MAX", 0.01)
    monkeypatch.delenv("ATTENTION_URL", raising=False)


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of small models."""
    return pytest.importorskip("tests.client.tiny_models").tokenizer()
