"""The inputs that a session keeps: joined, cut, shared with forks, bounded, spilled."""

import gc
import os

import ml_dtypes
import numpy as np
import pytest

from attention_client.sessions import kept_inputs
from attention_client.sessions.kept_inputs import KeptInputs
from attention_contract.schemas.sessions import ReorderSession, ReplaceCache, StepRequest, TruncateSession

DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16]


def tokens(count, start=0, dtype=np.float32):
    return np.arange(start, start + count, dtype=np.float64).reshape(1, count, 1).astype(dtype) * np.ones(
        (1, 1, 8), dtype
    )


def filled(steps=10, **options):
    kept = KeptInputs(**{"limit": 2**20} | options)
    for at in range(steps):
        kept.add(at, StepRequest(query=tokens(1, at), return_=["weights"], at=at, step=f"s{at}"))
    return kept


def queries(kept):
    """The numbers of all tokens, of steps that may be joined in any way."""
    return np.concatenate([step.query for step in kept.changes()], 1)[0, :, 0].tolist()


def test_small_steps_become_one_without_what_was_only_returned():
    (step,) = filled().changes()
    assert step.model_fields_set == {"query"}
    assert queries(filled()) == list(range(10))


def test_a_large_past_comes_in_steps_of_bounded_size(monkeypatch):
    monkeypatch.setattr(kept_inputs, "LARGE_STEP_TOKENS", 4)
    assert [step.query.shape[1] for step in filled().changes()] == [4, 4, 2]
    monkeypatch.setattr(kept_inputs, "LARGE_STEP_BYTES", 100)  # 32 bytes a token
    assert [step.query.shape[1] for step in filled().changes()] == [3, 3, 3, 1]


def test_steps_stay_apart_where_the_policy_looks_at_them():
    assert [step.query.shape[1] for step in filled(3, joins=False).changes()] == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_not_what_the_caller_writes_to(dtype):
    mine = tokens(2, dtype=dtype)
    kept = KeptInputs(2**20)
    kept.add(0, StepRequest(query=mine))
    mine += 7
    (step,) = kept.changes()
    assert (step.query.dtype, step.query[0, 1, 0]) == (dtype, 1)


def test_steps_with_more_than_inputs_keep_their_place():
    kept = filled(2)
    edits = [{"tap": "v", "set": 0.0, "keys": [0]}]
    kept.add(2, StepRequest(query=tokens(1, 2), edits=edits))
    kept.add(3, StepRequest(query=tokens(1, 3), key=tokens(1, 9)))
    kept.add(4, StepRequest(query=tokens(1, 4), key=tokens(1, 9)))
    kept.add(5, StepRequest(query=tokens(1, 5).tolist()))
    kept.add(6, StepRequest(query=tokens(1, 6).tolist()))
    sizes = [(step.query.shape[1], sorted(step.model_fields_set)) for step in kept.changes()]
    assert sizes == [(2, ["query"]), (1, ["edits", "query"]), (2, ["key", "query"]), (2, ["query"])]
    assert type(list(kept.changes())[-1].query).__name__ == "Untyped"


@pytest.mark.parametrize("length", [0, 3, 5, 10])
def test_truncation_forgets_whole_steps_and_cuts_plain_ones(length):
    for kept in (filled(), KeptInputs(2**20)):
        if not list(kept.changes()):
            kept.add(0, StepRequest(query=tokens(10)))
        kept.truncate(length, 10)
        found = queries(kept) if length else []
        assert found == list(range(length))
        assert kept._bytes == 32 * length


def test_truncation_within_a_step_that_cannot_be_cut_is_repeated():
    kept = filled(2)
    kept.add(2, StepRequest(query=tokens(3), positions=[[7, 8, 9]]))
    kept.truncate(4, 5)
    *_, last = kept.changes()
    assert last == TruncateSession(length=4)
    kept.add(4, ReorderSession(rows=[0, 0]))
    kept.truncate(1, 4)
    assert [type(change) for change in kept.changes()][-3:] == [TruncateSession, ReorderSession, TruncateSession]


def test_forks_share_arrays_and_go_separate_ways():
    kept = filled(4)
    fork = kept.copy()
    fork.truncate(2, 4)
    fork.add(2, StepRequest(query=tokens(1, 50)))
    kept.add(4, StepRequest(query=tokens(1, 4)))
    assert (queries(kept), queries(fork)) == ([0, 1, 2, 3, 4], [0, 1, 50])
    assert np.shares_memory(kept._kept[0].change.query, fork._kept[0].change.query)


def test_a_replaced_past_replaces_all_before_it():
    kept = filled(4, limit=64)
    assert "keep_bytes=64" in kept.missing
    past = np.ones((1, 1, 2, 2), np.float32)
    kept.replace(ReplaceCache(past_key=past, past_value=past))
    assert kept.missing is None
    assert [type(change) for change in kept.changes()] == [ReplaceCache]


def test_beyond_the_limit_nothing_is_kept():
    kept = filled(10, limit=32 * 9)
    assert (list(kept.changes()), kept._bytes) == ([], 0)
    kept.add(10, StepRequest(query=tokens(1)))
    kept.truncate(3, 11)
    assert list(kept.changes()) == []


def test_what_exceeds_the_limit_is_spilled_and_read_again():
    kept = KeptInputs(200, spill=True)
    for at in range(50):
        kept.add(at, StepRequest(query=tokens(1, at, ml_dtypes.bfloat16)))
    assert kept._bytes <= 200
    fork = kept.copy()
    fork.truncate(33, 50)
    assert (queries(kept), queries(fork)) == (list(range(50)), list(range(33)))
    kept.add(50, StepRequest(query=tokens(1), positions=np.array([[3]])))
    assert list(kept.changes())[-1].positions.tolist() == [[3]]


def test_spilled_inputs_leave_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()  # others' files may go at any time
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    kept = filled(100, limit=100, spill=True)
    assert queries(kept) == list(range(100))
    assert list(tmp_path.iterdir()) == []
    del kept
    gc.collect()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
