"""API keys: their file, and what a server makes of it while it runs."""

import json
import stat
import threading
from hashlib import sha256

import pytest

from attention_service.api.access import api_keys
from attention_service.api.access.api_keys import FILE, KeyRing, create_key, read_keys, revoke_key
from attention_service.api.access.key_commands import keys
from attention_service.modules.store_files import STAGED, clean


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch):
    monkeypatch.setattr(api_keys, "_LOOK_S", 0.0)


def test_the_file_has_hashes_alone_and_only_its_owner_reads_it(tmp_path):
    made = [create_key(tmp_path, name, ["infer"]) for name in ("one", "two")]
    text = (tmp_path / FILE).read_text()
    assert len(set(made)) == 2
    assert not any(key in text or key.removeprefix("attn_") in text for key in made)
    assert [entry["sha256"] for entry in json.loads(text)["keys"]] == [sha256(key.encode()).hexdigest() for key in made]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_a_killed_command_has_left_is_removed(tmp_path):
    """By the next command, and by the start of a server."""
    left = tmp_path / f"{STAGED}0123"
    for remove in (lambda: create_key(tmp_path, "one", ["infer"]), lambda: clean(tmp_path)):
        left.write_text('{"keys": [')
        remove()
        assert not left.exists()
    assert [key.name for key in read_keys(tmp_path)] == ["one"]


def test_a_running_server_notices_new_and_revoked_keys(tmp_path):
    ring = KeyRing(tmp_path)
    assert ring.find(b"attn_none") is None
    one = create_key(tmp_path, "one", ["infer"])
    two = create_key(tmp_path, "two", ["manage", "infer"])
    found = ring.find(one.encode()), ring.find(two.encode())
    assert [(each.caller.name, each.caller.manages, each.scopes) for each in found] == [
        ("one", False, {"infer"}),
        ("two", True, {"infer", "manage"}),
    ]
    revoke_key(tmp_path, "one")
    assert ring.find(one.encode()) is None
    assert ring.find(two.encode()).caller.name == "two"
    (tmp_path / FILE).unlink()
    assert ring.find(two.encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"keys": [{"name": "x"}]}',
        '{"keys": [{"name":"x","scopes":["all"],"sha256":"00","created":"2026-01-01"}]}',
    ],
)
def test_a_file_that_cannot_be_read_lets_nobody_in_and_is_not_overwritten(tmp_path, text):
    key = create_key(tmp_path, "one", ["infer"])
    ring = KeyRing(tmp_path)
    (tmp_path / FILE).write_text(text)
    assert ring.find(key.encode()) is None
    with pytest.raises(ValueError, match="validation error"):
        create_key(tmp_path, "two", ["infer"])
    assert (tmp_path / FILE).read_text() == text


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65, "10", "1\n", "é"])
def test_a_name_that_is_not_fit_is_refused(tmp_path, name):
    if name == "10":  # a number alone is no address
        create_key(tmp_path, name, ["infer"])
        return
    with pytest.raises(ValueError, match="expected"):
        create_key(tmp_path, name, ["infer"])
    assert read_keys(tmp_path) == []


def test_writers_that_run_side_by_side_lose_no_key(tmp_path):
    threads = [threading.Thread(target=create_key, args=(tmp_path, f"k{i}", ["infer"])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(tmp_path)} == {f"k{i}" for i in range(8)}


def test_the_command_creates_lists_and_revokes(tmp_path, capsys):
    folder = ["--models-dir", str(tmp_path)]
    assert keys(["create", "ci", "--scope", "manage", "--scope", "metrics", *folder]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(tmp_path).find(key.encode()).scopes == {"manage", "metrics"}
    assert keys(["list", *folder]) == 0
    listed = capsys.readouterr().out
    assert "ci" in listed
    assert "manage,metrics" in listed
    assert key not in listed
    assert keys(["create", "ci", *folder]) == 1
    assert "revoke it first" in capsys.readouterr().err
    assert keys(["revoke", "ci", *folder]) == 0
    assert keys(["revoke", "ci", *folder]) == 1
    assert KeyRing(tmp_path).find(key.encode()) is None
    assert keys(["create", "x", "--scope", "all", *folder]) == 2
