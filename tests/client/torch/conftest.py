"""The same random numbers in every run, and a count of the requests that are sent."""

import pytest

torch = pytest.importorskip("torch")
connection = pytest.importorskip("attention_client.torch.connection")


@pytest.fixture(autouse=True)
def seeded():
    """Draw the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """The requests of all connections: operation and fields."""
    requests = []
    attend = connection.Connection.attend

    def noted(self, operation, fields):
        requests.append((operation.name, dict(fields)))
        return attend(self, operation, fields)

    monkeypatch.setattr(connection.Connection, "attend", noted)
    return requests
