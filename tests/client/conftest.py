"""Both clients, and waits between attempts that a test can afford."""

import pytest

from attention_client import exchange
from tests.client.service import Played


@pytest.fixture(params=["sync", "async"])
def kind(request):
    """Which of the two clients asks."""
    return request.param


@pytest.fixture
def played():
    """A played service that answers at once."""
    return Played()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Milliseconds instead of tenths of seconds."""
    monkeypatch.setattr(exchange, "WAIT_INITIAL", 0.001)
    monkeypatch.setattr(exchange, "WAIT_JITTER", 0.001)
    monkeypatch.setattr(exchange, "WAIT_MAX", 0.01)
    monkeypatch.delenv("ATTENTION_URL", raising=False)
