"""Fitted lenses on disk: whole, their owner's, within a limit, and gone when they are deleted."""

from datetime import UTC, datetime

import numpy as np
import pytest
from safetensors.numpy import load_file

from attention_contract.errors import LensNotFound, StoreFull, TooLarge
from attention_contract.schemas.analyses.lenses import LensFacts
from attention_service.modules.fitted_store import LENSES, FittedStore

ID, OTHER = "0" * 32, "1" * 32
FACTS = LensFacts(model="tiny", created=datetime(2026, 1, 1, tzinfo=UTC), texts=2, width=8, layers=[0, 1])
MATRICES = {f"jacobians.{number}": np.full((8, 8), number, np.float32) for number in (0, 1)}


def lenses(root, limit):
    return FittedStore(root, limit, LENSES)


def unlimited(size, detail):
    assert size >= 512
    assert detail


def test_a_lens_is_read_as_it_was_written(tmp_path):
    made = lenses(tmp_path, 10_000).add(ID, FACTS, MATRICES, None, unlimited)
    store = lenses(tmp_path, 10_000)
    assert store.listing() == [made]
    assert (made.id, made.state, made.layers, made.texts) == (ID, "ready", [0, 1], 2)
    np.testing.assert_array_equal(load_file(store.path(ID))["jacobians.1"], MATRICES["jacobians.1"])
    store.delete(ID)
    assert store.listing() == []
    with pytest.raises(LensNotFound):
        store.path(ID)


def test_a_lens_is_its_owners_alone(tmp_path):
    store = lenses(tmp_path, 10_000)
    store.add(ID, FACTS, MATRICES, "ann", unlimited)
    assert [each.id for each in store.listing("ann")] == [ID]
    assert store.listing("bob") == []
    for use in (store.path, store.get, store.delete):
        with pytest.raises(LensNotFound):
            use(ID, "bob")
    assert store.path(ID) == store.path(ID, "ann")  # None: those who may use all


def test_the_limit_counts_the_lenses_of_all_owners(tmp_path):
    store = lenses(tmp_path, 1200)
    with pytest.raises(TooLarge):
        lenses(tmp_path, 500).add(ID, FACTS, MATRICES, None, unlimited)
    store.add(ID, FACTS, MATRICES, "ann", unlimited)
    with pytest.raises(StoreFull):
        store.add(OTHER, FACTS, MATRICES, "bob", unlimited)


def test_damaged_files_and_leftovers_are_no_lenses(tmp_path):
    store = lenses(tmp_path, 10_000)
    store.add(ID, FACTS, MATRICES, None, unlimited)
    folder = store.path(ID).parent
    (folder / f"{OTHER}.safetensors").write_bytes(b"no lens")
    (folder / ".new-0").write_bytes(b"half")
    assert [each.id for each in store.listing()] == [ID]
    with pytest.raises(LensNotFound, match="cannot be read"):
        store.get(OTHER)
    store.clean()
    assert not (folder / ".new-0").exists()
    with pytest.raises(LensNotFound):
        store.path("../" + ID)
