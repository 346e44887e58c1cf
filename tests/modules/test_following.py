"""A library follows the changes that other processes make in its store, and reads only files that changed."""

import pytest

from attention_service.modules import store as store_module


@pytest.fixture
def opened(monkeypatch):
    """The files that the store reads."""
    found = []
    real = store_module.read_regular
    monkeypatch.setattr(store_module, "read_regular", lambda path, limit: found.append(path) or real(path, limit))
    return found


def test_a_store_without_changes_is_not_read(library, request_for, reopen, opened):
    library.create(request_for("a"))
    library.create(request_for("b"))
    replica = reopen()
    opened.clear()
    assert replica.follow() == []
    assert opened == []
    library.create(request_for("c"))
    assert replica.follow() == []
    assert {path.parent.name for path in opened} == {"c"}
    assert [module.name for module in replica.list()] == ["a", "b", "c"]
    library.delete("a")
    assert replica.follow() == []
    assert [module.name for module in replica.list()] == ["b", "c"]


def test_a_damaged_module_is_reported_once_and_again_when_it_changes(library, request_for, root):
    library.create(request_for())
    config = root / "modules" / "m" / "config.json"
    whole = config.read_bytes()
    config.write_bytes(b"")
    (problem,) = library.follow()
    assert "is not JSON" in problem
    assert library.follow() == []
    assert list(library.problems) == ["m"]
    config.write_bytes(b"{}")
    (problem,) = library.follow()
    assert "states no format" in problem
    config.write_bytes(whole)
    assert library.follow() == []
    assert library.problems == {}


def test_a_store_that_is_gone_is_reported_once_and_its_modules_stay(library, request_for, root):
    module, _ = library.create(request_for())
    (root / "modules").rename(root / "elsewhere")
    (problem,) = library.follow()
    assert "cannot be read" in problem
    assert library.follow() == []
    assert library.get("m") is module
    (root / "elsewhere").rename(root / "modules")
    assert library.follow() == []
    assert library.problems == {}


def test_a_module_that_is_not_durable_stays(library, request_for):
    library.create(request_for().model_copy(update={"durable": False}))
    library.create(request_for("other"))
    assert library.follow() == []
    assert [module.name for module in library.list()] == ["m", "other"]
