"""Compiled code is kept, whole, for its sources and this processor; where it cannot be made, that is told."""

import os
import subprocess
import sys
import threading
from hashlib import sha256

import pytest

pytest.importorskip("numba")

from attention_contract import lists
from attention_contract.lists import linking


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where code is kept: two folders, the first of which can't be written to."""
    blocked = tmp_path / "file" / "folder"
    blocked.parent.touch()
    found = [blocked, tmp_path / "second"]
    monkeypatch.setattr(linking, "_folders", lambda: iter(found))
    return found


@pytest.fixture
def made(monkeypatch):
    """For which processors code was made; it is that which is kept outside of the test."""
    asked, times = [], []
    kept = linking._kept
    with monkeypatch.context() as patched:
        patched.setattr(linking, "_kept", lambda name: asked.append(name) or kept(name))
        linking.link()
    code = kept(asked[0]) or linking._made(*linking._processor())
    monkeypatch.setattr(linking, "_made", lambda cpu, features: times.append((cpu, features)) or code)
    return times


def test_code_is_made_once_and_kept_where_that_can_be_done(made, folders):
    for _ in range(2):
        linking.link()
    assert len(made) == 1
    assert [path.suffix for path in folders[1].iterdir()] == [".o"]


def test_another_processor_and_other_sources_have_code_of_their_own(made, folders, monkeypatch, tmp_path):
    linking.link()
    monkeypatch.setattr(linking, "_processor", lambda: ("generic", ""))
    linking.link()
    assert [processor == ("generic", "") for processor in made] == [False, True]
    (tmp_path / "lists").mkdir()
    (tmp_path / "tensors.py").touch()
    monkeypatch.setattr(linking, "_HERE", tmp_path / "lists")
    linking.link()
    assert len(made) == 3
    assert len(list(folders[1].iterdir())) == 3


def test_a_file_that_is_not_whole_is_made_anew(made, folders):
    linking.link()
    (file,) = folders[1].iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    linking.link()
    assert len(made) == 2


def given_away(file):
    os.chown(file, 4711, 4711)


def open_to_all(file):
    file.chmod(0o666)


def elsewhere(file):
    file.symlink_to(file.replace(file.with_name("elsewhere")))


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def in_an_open_folder(file):
    file.parent.chmod(0o777)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no modes here")
@pytest.mark.parametrize("change", [given_away, open_to_all, elsewhere, a_pipe, in_an_open_folder])
def test_what_others_may_have_written_is_not_run(made, folders, change):
    if change is given_away and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    linking.link()
    (file,) = folders[1].iterdir()
    change(file)
    linking.link()
    assert len(made) == 2


def test_kept_code_that_does_not_fit_is_made_anew(made, folders):
    linking.link()
    (file,) = folders[1].iterdir()
    file.write_bytes(sha256(b"no object").digest() + b"no object")
    for _ in range(2):
        linking.link()
    assert len(made) == 2


def test_what_compiles_can_be_stopped(folders, monkeypatch, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    stopped = threading.Timer(0.5, lists.give_up)
    stopped.start()
    with pytest.raises(subprocess.CalledProcessError):
        linking.link()
    stopped.join()


def test_what_cannot_be_linked_is_not_kept(folders, monkeypatch):
    monkeypatch.setattr(linking, "_made", lambda cpu, features: b"no object")
    with pytest.raises(RuntimeError):
        linking.link()
    assert not folders[1].exists()


def test_where_nothing_can_be_kept_it_is_made_each_time(made, folders):
    folders.pop()
    for _ in range(2):
        linking.link()
    assert len(made) == 2


def test_a_compiler_that_fails_is_told(folders, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        linking.link()
    assert not folders[1].exists()


def test_who_links_imports_no_compiler():
    program = "import sys; from attention_contract import lists; lists.load(); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
