"""A client of the live server that all tests share."""

from collections.abc import Iterator

import pytest

from attention_client import Client


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client
