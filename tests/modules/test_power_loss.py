"""Power loss at every operation of the store: each acknowledged change is there, and the store loads."""

from pathlib import Path

import pytest
import torch
from tests.modules.power_loss import Disk, materialize

from attention_contract.schemas.modules import CreateModule
from attention_service.core.tensors import to_numpy
from attention_service.modules import store as store_module
from attention_service.modules import store_files
from attention_service.modules.library import Library

CONFIG = {"d_model": 2, "num_heads": 1, "bias": False}


def opened(root):
    library = Library(root, torch.device("cpu"))
    problems = library.load()
    assert problems == []
    return library


def versions(library):
    return {module.name: module.version for module in library.list()}


def create(name, seed):
    return lambda library: library.create(CreateModule(name=name, config=CONFIG, seed=seed))


def replace(name, number):
    return lambda library: library.replace(
        name, {key: to_numpy(value) * number for key, value in library.get(name).parameters.items()}
    )


CHANGES = [
    create("a", 1), replace("a", 2), create("b", 2), replace("a", 3), replace("b", 2),
    lambda library: library.delete("a"), create("a", 5), lambda library: library.delete("b"),
]  # fmt: skip


def run(folder: Path, crashes: int, monkeypatch) -> int:
    """Make every change on a disk that is recorded, and open what a crash leaves after each operation."""
    expected = [{}]
    library = opened(folder / "plain" / "models")
    for change in CHANGES:
        change(library)
        expected.append(versions(library))
    (folder / "disk").mkdir()
    states = []
    with monkeypatch.context() as patch:
        disk = Disk(folder / "disk", patch, store_module, store_files)
        step = 0
        disk.after = lambda: states.extend((step, each) for each in disk.crashes(crashes, len(states)))
        library = opened(folder / "disk" / "deep" / "models")
        for step, change in enumerate(CHANGES):
            change(library)
            states += [(step + 1, each) for each in disk.crashes(crashes, len(states))]
    seen = {}
    for number, (step, state) in enumerate(states):
        if repr_of(state) in seen.setdefault(step, set()):
            continue
        seen[step].add(repr_of(state))
        left = folder / f"left{number}"
        materialize(state, left)
        found = versions(opened(left / "deep" / "models"))
        allowed = expected[step : step + 2]
        assert found in allowed, (step, found, allowed)
    return sum(map(len, seen.values()))


def repr_of(folder):
    """A text that is equal for equal states."""
    return repr(
        [(name, repr_of(each) if hasattr(each, "entries") else each.content) for name, each in folder.entries.items()]
    )


def test_every_acknowledged_change_outlives_a_power_loss(tmp_path, monkeypatch):
    assert run(tmp_path, 3, monkeypatch) > 50


@pytest.mark.slow
def test_many_states_after_a_power_loss(tmp_path, monkeypatch):
    assert run(tmp_path, 60, monkeypatch) > 200


@pytest.mark.parametrize("forgotten", ["file", "folder"])
def test_a_sync_that_is_left_out_is_noticed(tmp_path, monkeypatch, forgotten):
    real = store_files.sync

    def forgetful(path):
        if path.is_dir() != (forgotten == "folder"):
            real(path)

    monkeypatch.setattr(store_module, "sync", forgetful)
    with pytest.raises(AssertionError):
        run(tmp_path, 6, monkeypatch)
