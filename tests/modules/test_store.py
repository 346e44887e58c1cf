import contextlib
import errno
import itertools
import json
import os
import resource
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention_contract.errors import (
    InternalError,
    ModuleExists,
    ModuleNotFound,
    StoreFull,
    StoreReadOnly,
    VersionMismatch,
)
from attention_service.core.tensors import to_numpy
from attention_service.modules import library as library_module
from attention_service.modules import store as store_module
from attention_service.modules.library import Library


def plus(module, number):
    return {name: to_numpy(value) + number for name, value in module.parameters.items()}


def state(library):
    assert library.problems == {}
    return {module.name: module.version for module in library.list()}


def entries(root):
    return sorted(str(path.relative_to(root / "modules")) for path in (root / "modules").rglob("*"))


def test_a_new_process_finds_every_module_unchanged(library, request_for, reopen):
    library.create(request_for("a", seed=1, dtype="bfloat16", spec={"masks": [{"name": "causal"}], "softcap": 30}))
    library.create(request_for("b", bias={"v_proj": True}, num_kv_heads=1, value_dim=3))
    library.replace("b", plus(library.get("b"), 1))
    seen = []
    again = Library(library.root, torch.device("cpu"))
    assert again.load(lambda module: seen.append(module.name)) == []
    assert seen == ["a", "b"]
    for old, new in zip(library.list(), again.list(), strict=True):
        assert new.info() == old.info()
        assert list(new.parameters) == list(old.parameters)
        for name, value in old.parameters.items():
            assert torch.equal(new.parameters[name], value)
    library.delete("a")
    assert list(state(reopen())) == ["b"]


def test_only_files_of_the_current_version_remain(library, request_for, root):
    module, _ = library.create(request_for())
    assert entries(root) == ["m", "m/config.json", f"m/parameters-{module.version}.safetensors"]
    module = library.replace("m", plus(module, 1))
    assert entries(root) == ["m", "m/config.json", f"m/parameters-{module.version}.safetensors"]
    library.delete("m")
    assert entries(root) == []


def test_the_umask_decides_the_permissions(library, request_for, root):
    library.create(request_for())
    (root / "plain").write_text("")
    modes = {path.stat().st_mode for path in (root / "modules" / "m").iterdir()}
    assert modes == {(root / "plain").stat().st_mode}


class Faults:
    """Fault in the n-th durable step of the store, before or after its effect."""

    def __init__(self, monkeypatch, fail_at, after):
        self.steps = 0
        self.fail_at, self.after = fail_at, after
        for owner, name in [(store_module.os, "replace"), (store_module.os, "fsync"), (store_module, "save_file")]:
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, step):
        def stepped(*args, **options):
            failing = self.steps == self.fail_at
            self.steps += 1
            if failing and not self.after:
                raise OSError(28, "No space left on device")
            step(*args, **options)
            if failing:
                raise OSError(5, "Input/output error")

        return stepped


CHANGES = {
    "create": lambda library, request: library.create(request("other")),
    "replace": lambda library, request: library.replace("m", plus(library.get("m"), 1)),
    "delete": lambda library, request: library.delete("m"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_at_any_step_leaves_the_old_or_the_new(change, after, root, request_for, reopen):
    library = reopen()
    library.create(request_for())
    old = state(library)
    CHANGES[change](library, request_for)
    new = state(reopen())
    shutil.rmtree(root / "modules")
    outcomes = []
    for fail_at in itertools.count():
        library = reopen()
        library.create(request_for())
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at, after)
            failure = None
            try:
                CHANGES[change](library, request_for)
            except (InternalError, StoreFull) as fault:
                failure = fault
        if failure is None:
            assert faults.steps <= fail_at
            break
        assert str(root) not in failure.detail
        in_memory = {module.name: module.version for module in library.list()}
        found = state(reopen())
        assert found in (old, new)
        assert in_memory == found
        outcomes.append(found)
        library = reopen()
        if found == old:
            CHANGES[change](library, request_for)  # a retry is possible
            assert state(reopen()) == new
        leftovers = [entry for entry in entries(root) if entry.startswith(".") or "/." in entry]
        assert leftovers == []
        shutil.rmtree(root / "modules")
    assert len(outcomes) >= 2
    assert outcomes == sorted(outcomes, key=lambda found: found == new)  # a later fault never restores the old state


def _config(change):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def _parameters(change):
    def damage(folder):
        (path,) = folder.glob("*.safetensors")
        change(path)

    return damage


def _without_one(path):
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if name != "q_proj.bias"}, path)


def _one_other_number(path):
    tensors = load_file(path)
    tensors["q_proj.bias"][0] = 1
    save_file(tensors, path)


def _in_integers(path):
    save_file({name: value.to(torch.int8) for name, value in load_file(path).items()}, path)


def _special(file, make):
    """Put something else where the one file of this name was."""

    def damage(folder):
        (path,) = folder.glob(file)
        path.rename(folder.parent / "elsewhere")
        make(path)

    return damage


def _socket(path):
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
        bound.bind(path.name)  # a whole path may exceed the 107 bytes that such an address holds


def _folder_elsewhere(folder):
    folder.rename(folder.parent / ".elsewhere")
    folder.symlink_to(folder.parent / ".elsewhere")


def _large(path):
    os.truncate(path, 2**42)  # takes no blocks


DAMAGE = {
    "config.json cannot be read: it is no regular file": _special("config.json", os.mkfifo),
    "config.json cannot be read: No such device": _special("config.json", _socket),
    "config.json cannot be read: it is no regular": _special("config.json", Path.mkdir),
    "config.json cannot be read: Too many levels": _special(
        "config.json", lambda path: path.symlink_to("../elsewhere")
    ),
    "config.json cannot be read: it has 4398046511104 bytes": lambda folder: _large(folder / "config.json"),
    "config.json is not JSON$|config.json is not JSON;": lambda folder: (folder / "config.json").write_text(
        "[" * 10**5
    ),
    "its folder is a symbolic link": _folder_elsewhere,
    "safetensors cannot be read: it is no regular file": _special("*.safetensors", os.mkfifo),
    "safetensors cannot be read: Too many levels": _special("*.safetensors", lambda p: p.symlink_to("../elsewhere")),
    "safetensors cannot be read: it has 4398046511104 bytes": _parameters(_large),
    "config.json is missing": lambda folder: (folder / "config.json").unlink(),
    "config.json is not JSON": lambda folder: (folder / "config.json").write_text("{"),
    "states no format": _config(lambda _: []),
    "format 2; this server reads up to 1": _config(lambda d: d | {"format": 2}),
    "states no version": _config(lambda d: d | {"version": "../../etc/passwd"}),
    f"parameters-{'0' * 32}.safetensors is missing": _config(lambda d: d | {"version": "0" * 32}),
    "holds no valid ModuleConfig: d_model": _config(lambda d: d | {"config": {"num_heads": 2}}),
    "holds no valid Source": _config(lambda d: d | {"source": {}}),
    "but [0-9a-f]{32} was written": _config(lambda d: d | {"config": d["config"] | {"spec": {"softcap": 3}}}),
    "k_proj.bias": _config(lambda d: d | {"config": d["config"] | {"bias": False}}),
    "its config says float64": _config(lambda d: d | {"config": d["config"] | {"dtype": "float64"}}),
    "safetensors is missing": _parameters(lambda path: path.unlink()),
    "safetensors cannot be read": _parameters(lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "q_proj.bias missing": _parameters(_without_one),
    "its content has version": _parameters(_one_other_number),
    "dtype that modules cannot have": _parameters(_in_integers),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_module_is_logged_kept_and_skipped(words, library, request_for, root, reopen):
    library.create(request_for("broken"))
    library.create(request_for("whole"))
    DAMAGE[words](root / "modules" / "broken")
    before = entries(root)
    again = reopen()
    assert [module.name for module in again.list()] == ["whole"]
    (problem,) = again.problems.values()
    with pytest.raises(AssertionError, match=f"module 'broken': .*{words}"):
        raise AssertionError(problem)
    assert str(root) not in problem
    assert entries(root) == before
    with pytest.raises(ModuleExists, match="cannot be read"):
        again.create(request_for("broken"))
    with pytest.raises((ModuleNotFound, InternalError)):
        again.delete("broken")
    assert entries(root) == before


def test_a_module_beyond_the_memory_for_modules_is_set_aside_until_there_is_some(
    library, request_for, root, monkeypatch
):
    library.create(request_for("large", d_model=256))
    library.create(request_for("small"))
    tight = Library(root, torch.device("cpu"))
    tight.limit = 10_000
    (problem,) = tight.load()
    assert "module 'large': its parameters take 1052672 bytes" in problem
    assert [module.name for module in tight.list()] == ["small"]
    tight.limit = 2_000_000
    assert tight.follow() == []
    assert [module.name for module in tight.list()] == ["small"]
    monkeypatch.setattr(library_module, "RETRY_S", 0.0)
    assert tight.follow() == []
    assert [module.name for module in tight.list()] == ["large", "small"]
    assert tight.problems == {}


def test_a_write_that_the_disk_does_not_take_leaves_nothing(library, request_for, root):
    library.create(request_for("kept"))
    before = entries(root)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, most))
    try:
        with pytest.raises(StoreFull, match=r"module 'large'.*File too large") as caught:
            library.create(request_for("large", d_model=128))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert str(root) not in caught.value.detail
    assert entries(root) == before
    assert list(state_of(library)) == ["kept"]
    assert library.create(request_for("large", d_model=128))[1]


def test_a_store_that_may_not_be_written_says_so(library, request_for, root, reopen, monkeypatch):
    module, _ = library.create(request_for())

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for owner, name in [(Path, "mkdir"), (os, "replace")]:
        monkeypatch.setattr(owner, name, refused)
    for change in CHANGES.values():
        with pytest.raises(StoreReadOnly, match=r"Read-only.*durable: false"):
            change(library, request_for)
        assert state_of(library) == {"m": module.version}
    assert state(reopen()) == {"m": module.version}


def test_a_module_with_damaged_files_stays_resident(library, request_for, root):
    module, _ = library.create(request_for())
    (root / "modules" / "m" / "config.json").write_text("")
    (problem,) = library.refresh()
    assert "config.json is not JSON" in problem
    assert library.get("m") is module
    with pytest.raises(InternalError, match="cannot be read"):
        library.replace("m", plus(module, 1))


def test_a_missing_store_folder_is_an_error(library, request_for, root):
    module, _ = library.create(request_for())
    (root / "modules").rename(root / "elsewhere")
    (problem,) = library.refresh()
    assert "cannot be read" in problem
    assert library.get("m") is module


def test_other_files_stay_untouched(library, request_for, root, reopen):
    library.create(request_for())
    modules = root / "modules"
    (modules / ".DS_Store").write_text("")
    (modules / "notes.txt").write_text("")
    (modules / "a folder").mkdir()
    (modules / "m" / "README.md").write_text("")
    before = entries(root)
    assert list(state(reopen())) == ["m"]
    assert entries(root) == before


def test_incomplete_files_of_a_crash_are_removed(library, request_for, root, reopen):
    module, _ = library.create(request_for())
    modules = root / "modules"
    before = entries(root)
    shutil.copytree(modules / "m", modules / ".new-0123")
    shutil.copytree(modules / "m", modules / ".removed-0123")
    (modules / ".new-0123" / ".tmp").write_text("half")
    shutil.copy(
        modules / "m" / f"parameters-{module.version}.safetensors",
        modules / "m" / f"parameters-{'0' * 32}.safetensors",
    )
    assert state(reopen()) == {"m": module.version}
    assert entries(root) == before


def test_a_replica_takes_over_the_changes_of_another(library, request_for, reopen):
    replica = reopen()
    a, _ = library.create(request_for("a"))
    b, _ = library.create(request_for("b"))
    assert replica.refresh() == []
    assert [module.version for module in replica.list()] == [a.version, b.version]
    held = replica.get("a")
    changed = library.replace("a", plus(a, 1))
    library.delete("b")
    assert replica.get("a") is held
    assert replica.refresh() == []
    assert [module.version for module in replica.list()] == [changed.version]
    assert replica.refresh() == []


def test_replicas_do_not_overwrite_each_other(library, request_for, reopen):
    replica = reopen()
    module, _ = library.create(request_for())
    with pytest.raises(ModuleExists):
        replica.create(request_for(seed=5))
    assert replica.create(request_for())[1] is False
    changed = library.replace("m", plus(module, 1))
    with pytest.raises(VersionMismatch) as caught:
        replica.replace("m", plus(module, 2), module.version)
    assert caught.value.facts["actual"] == changed.version
    library.delete("m")
    with pytest.raises(ModuleNotFound):
        replica.replace("m", plus(module, 2))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_another_process_before_the_write_is_a_conflict(change, library, request_for, reopen, monkeypatch):
    module, _ = library.create(request_for())
    replica = reopen()
    look = replica._refresh

    def overtaken(name):
        look(name)
        monkeypatch.setattr(replica, "_refresh", look)
        if name == "m":
            library.replace("m", plus(module, 3))
        else:
            library.create(request_for("other", seed=7))

    monkeypatch.setattr(replica, "_refresh", overtaken)
    with pytest.raises((VersionMismatch, ModuleExists)):
        CHANGES[change](replica, request_for)
    assert state(reopen()) == state_of(replica) == state_of(library)


def state_of(library):
    return {module.name: module.version for module in library.list()}


def test_the_error_for_a_full_disk_contains_no_paths(library, request_for, root, monkeypatch):
    def full(*_, **__):
        raise store_module.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(StoreFull, match="No space left") as caught:
        library.create(request_for())
    assert str(root) not in caught.value.detail
    assert library.list() == []
    assert entries(root) == []


def test_nan_parameters_survive(library, request_for, reopen):
    module, _ = library.create(request_for())
    changed = library.replace(
        "m", {name: np.full(v.shape, np.nan, np.float32) for name, v in module.parameters.items()}
    )
    assert state(reopen()) == {"m": changed.version}
