"""The store of recordings: whole files or none, one limit for all writers, reading parts alone."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from attention_contract.errors import InternalError, RecordingNotFound, StoreFull, StoreReadOnly, TooLarge
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile, RecordingQuery
from attention_service.modules.recording_store import RecordingStore


def recording(seed=0, tokens=2, **changed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(tokens), (1, tokens)).astype(np.float32)
    facts = {"tokens": {"layers": ["x"] * tokens}, "layers": {"0.weights": weights}}
    return RecordingFile.model_validate(EXAMPLE_RECORDING | facts | changed)


def names(folder):
    return sorted(path.name for path in (folder / "recordings").iterdir())


def together(count, work):
    """Call ``work`` with each number at once, in a thread each, and return the results."""
    start = threading.Barrier(count)

    def run(number):
        start.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, InternalError)]
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, number, error, step):
    store = RecordingStore(tmp_path, 2**20)
    kept = store.add(recording())

    def fail(*_):
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(error) as caught:
        store.add(recording(1))
    assert str(tmp_path) not in caught.value.detail
    monkeypatch.undo()
    assert names(tmp_path) == [f"{kept.id}.safetensors"]
    assert [each.id for each in store.listing().recordings] == [kept.id]


def test_a_recording_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: steps.append(name) or real(*given))
    RecordingStore(tmp_path, 2**20).add(recording())
    assert steps[-3:] == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_writers_keep_the_limit_together(tmp_path):
    size = RecordingStore(tmp_path / "measure", 2**20).add(recording()).bytes
    stores = [RecordingStore(tmp_path, 3 * size + 64) for _ in range(2)]
    refused = []

    def add(seed):
        try:
            stores[seed % 2].add(recording(seed))
        except StoreFull as fault:
            refused.append(fault.facts["held_bytes"])

    threads = [threading.Thread(target=add, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == [3 * size] * 5
    assert len(names(tmp_path)) == 3


def test_the_newest_comes_first_and_another_process_may_delete(tmp_path):
    store, other = RecordingStore(tmp_path, 2**20), RecordingStore(tmp_path, 2**20)
    old = store.add(recording(created="2026-01-01T00:00:00Z"))
    new = store.add(recording(created="2026-01-02T00:00:00Z"))
    assert [each.id for each in other.listing().recordings] == [new.id, old.id]
    other.delete(new.id)
    assert [each.id for each in store.listing().recordings] == [old.id]
    with pytest.raises(RecordingNotFound):
        store.get(new.id, RecordingQuery())


def test_the_order_of_tensors_does_not_change_the_id(tmp_path):
    store = RecordingStore(tmp_path, 2**20)
    tensors = {"0.weights": np.eye(2, dtype=np.float32)[None], "0.hidden": np.ones((2, 3), np.float32)}
    first = store.add(recording(layers=tensors))
    assert store.add(recording(layers=dict(reversed(tensors.items())))).id == first.id
    assert store.add(recording(layers=tensors | {"0.hidden": np.ones((2, 3), np.float64)})).id != first.id
    assert store.add(recording(layers=tensors, text="another")).id != first.id


def test_a_recording_beyond_the_limit_alone_is_too_large(tmp_path):
    with pytest.raises(TooLarge) as caught:
        RecordingStore(tmp_path, 100).add(recording())
    assert caught.value.facts["limit_bytes"] == 100
    assert not (tmp_path / "recordings").exists()


def test_the_bytes_of_a_part_are_known_before_it_is_read(tmp_path):
    store = RecordingStore(tmp_path, 2**20)
    made = store.add(recording(tokens=8))
    assert store.part_bytes(made.id, RecordingQuery()) == 0
    assert store.part_bytes(made.id, RecordingQuery(layer="0")) == 2 * 8 * 8 * 4
    query = RecordingQuery(layer="0", queries="1,5", keys="2:4")
    assert store.part_bytes(made.id, query) == 2 * 2 * 2 * 4
    assert store.get(made.id, query).value.shape == (1, 2, 2)


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/hostname"), lambda path: path.symlink_to("gone")]
)
def test_what_is_no_file_is_reported_and_never_read(tmp_path, make):
    store = RecordingStore(tmp_path, 2**20)
    kept = store.add(recording())
    strange = "0" * 32
    make(tmp_path / "recordings" / f"{strange}.safetensors")
    listed = store.listing()
    assert ([each.id for each in listed.recordings], listed.damaged) == ([kept.id], [strange])
    with pytest.raises(RecordingNotFound):
        store.get(strange, RecordingQuery())
    with pytest.raises(RecordingNotFound):
        store.path(strange)
    assert store.add(recording(1)).id in {each.id for each in store.listing().recordings}
    store.delete(strange)
    assert store.listing().damaged == []
    with pytest.raises(RecordingNotFound):
        store.delete(strange)


def test_recordings_are_added_deleted_and_read_at_once_without_a_fault(tmp_path):
    stores = [RecordingStore(tmp_path, 2**24) for _ in range(2)]  # two servers on one folder
    owners = ("ann", "bob")

    def work(number):
        mine = stores[number % 2]
        for turn in range(30):
            owner = owners[turn % 2]
            made = mine.add(recording(turn // 2), owner, lambda *_: None)  # every thread has the same recordings
            with suppress(RecordingNotFound):  # another was faster
                mine.get(made.id, RecordingQuery(layer="0"), owner)
            with suppress(RecordingNotFound):
                mine.delete(made.id, owner)
            mine.listing(owner)

    together(6, work)
    kept = stores[0].add(recording(99), "ann")
    listed = stores[1].listing()
    assert kept.id in {each.id for each in listed.recordings}
    assert (listed.damaged, list((tmp_path / "recordings").glob(".new-*"))) == ([], [])


@pytest.mark.parametrize("layer", [None, "0"])
def test_a_recording_that_is_deleted_before_it_is_read_is_missing(tmp_path, monkeypatch, layer):
    store = RecordingStore(tmp_path, 2**20)
    made = store.add(recording())
    path = store.path(made.id)
    monkeypatch.setattr(store, "path", lambda *_: path)  # found by a reader just before it is gone
    store.delete(made.id)
    with pytest.raises(RecordingNotFound):
        store.get(made.id, RecordingQuery(layer=layer))


@pytest.mark.parametrize("owner", [None, "ann"])
def test_a_damaged_recording_counts_no_longer_and_can_be_added_again(tmp_path, owner):
    size = RecordingStore(tmp_path / "measure", 2**20).add(recording()).bytes
    store = RecordingStore(tmp_path, 2 * size)
    broken, whole = store.add(recording(), owner), store.add(recording(1), owner)
    with pytest.raises(StoreFull):
        store.add(recording(2), owner)
    cut(store.path(broken.id, owner))
    kept = store.add(recording(2), owner)
    listed = store.listing()
    assert ({each.id for each in listed.recordings}, listed.damaged) == ({whole.id, kept.id}, [broken.id])
    assert listed.bytes == 2 * size
    store.delete(kept.id, owner)
    assert store.add(recording(), owner).id == broken.id  # in the place of the damaged file
    assert (store.listing().damaged, store.listing().bytes) == ([], 2 * size)


def test_a_damaged_recording_is_found_at_the_start_and_its_removal_frees_nothing(tmp_path):
    size = RecordingStore(tmp_path, 2**20).add(recording()).bytes
    broken = tmp_path / "recordings" / f"{'0' * 32}.safetensors"
    with broken.open("wb") as file:
        file.truncate(10 * 2**30)
    store = RecordingStore(tmp_path, 2 * size)
    store.clean()
    store.add(recording(1))
    store.delete(broken.stem)
    with pytest.raises(StoreFull):
        store.add(recording(2))


def test_a_recording_that_was_removed_by_hand_frees_its_bytes(tmp_path):
    size = RecordingStore(tmp_path / "measure", 2**20).add(recording()).bytes
    store = RecordingStore(tmp_path, size)
    store.path(store.add(recording()).id).unlink()
    store.add(recording(1))


def test_a_removal_does_not_wait_for_a_writer(tmp_path, monkeypatch):
    store = RecordingStore(tmp_path, 2**20)
    first = store.add(recording())
    writing, go_on, synced = threading.Event(), threading.Event(), os.fsync

    def slowly(descriptor):
        if threading.current_thread().name.startswith("writer"):
            writing.set()
            assert go_on.wait(60)
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    with ThreadPoolExecutor(1, "writer") as writer, ThreadPoolExecutor(1, "remover") as remover:
        made = writer.submit(store.add, recording(1))
        assert writing.wait(60)
        try:
            remover.submit(store.delete, first.id).result(30)
        finally:
            go_on.set()
        assert made.result().id in {each.id for each in store.listing().recordings}


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def test_a_folder_that_may_not_be_written_is_reported_without_advice_for_modules(tmp_path, monkeypatch):
    store = RecordingStore(tmp_path, 2**20)
    made = store.add(recording())

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    for change in (lambda: store.add(recording(1)), lambda: store.delete(made.id)):
        with pytest.raises(StoreReadOnly, match=r"make the models folder writable$"):
            change()
