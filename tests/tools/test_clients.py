"""Stock clients get the statuses and numbers that they must. `make test-interop` makes their environment."""

import pytest
from tools.interop.beside_triton import documented
from tools.interop.environment import PYTHON, ROOT, ask_by_clients
from tools.interop.raw_requests import raw_requests


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="the clients' environment is not there; make test-interop makes it")
def test_stock_clients_are_answered_as_they_expect():
    done = ask_by_clients()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 6


def test_the_document_names_requests_that_are_sent_to_triton():
    names = [each.name for each in raw_requests()]
    assert len(set(names)) == len(names)
    assert documented() < set(names)
    assert f"sends {len(names)} raw requests" in (ROOT / "docs" / "agents.md").read_text("utf-8")
