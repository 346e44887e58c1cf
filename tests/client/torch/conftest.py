"""A client of the live server, and a count of the requests that it sends."""

from collections.abc import Iterator

import pytest
import torch

from attention_client import Client
from attention_client.torch.connection import Connection


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Client]:
    """A client that the tests of a file share."""
    with Client(server) as client:
        yield client


@pytest.fixture(autouse=True)
def seeded():
    """Draw the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """The requests of all connections: operation and fields."""
    requests = []
    attend = Connection.attend

    def noted(self, operation, fields):
        requests.append((operation.name, dict(fields)))
        return attend(self, operation, fields)

    monkeypatch.setattr(Connection, "attend", noted)
    return requests
