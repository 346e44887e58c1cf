"""Sessions on a GPU: what their steps and the pasts that they are given make the GPU and the host do."""

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.sessions import FullPolicy
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.pages import PagePool, Pages
from attention_service.core.kv_cache.past import Cached
from attention_service.runtime.scheduling import batches
from attention_service.runtime.sessions import step_operation
from attention_service.runtime.sessions.decode_session import DecodeSession, page_kind
from attention_service.runtime.sessions.step import begin_with

CAUSAL = {"masks": [{"name": "causal"}]}


def test_a_past_is_copied_piece_by_piece_without_a_wait_for_each(cuda):
    module = cuda.module("bfloat16", d_model=64, num_heads=4, spec=CAUSAL)
    session = DecodeSession("s", module, [BlockTable(PagePool(), page_kind(module))], FullPolicy(), ttl_s=1.0)
    past = torch.zeros(1, 4, 10_000, 16)
    with cuda.counted():
        session.tables[0].reserve(10_000)
    with cuda.counted() as counts:
        begin_with(session, past, past)
    assert session.held == session.length == 10_000
    assert len(counts.uploads) == 2 * 10
    assert not counts.blocking_uploads
    assert counts.largest <= past.nbytes // 8
    assert len(counts.waits) == 1  # at the end, for the stream of the thread


def _steps(cuda, module, device, sessions, past, slabs=1):
    """One step of each session, in one pass, and what it did."""
    kind, jobs = page_kind(module), []
    pools = [PagePool() for _ in range(slabs)]
    with cuda.counted():
        for pool in pools:
            pool.paged = True
            (whole,) = pool.take(kind, sessions * (past // kind.page_tokens + 2))
            pool.give_back(Pages(whole.slab, whole.first, whole.count - 1))  # one slab for all
        for index in range(sessions):
            table = BlockTable(pools[index % slabs], kind)
            table.append(table.writable(past))
            query = np.zeros((1, 1, module.sizes.d_model), ml_dtypes.bfloat16)
            rows = (Cached(table.spans, table.writable(1)),)
            jobs.append(step_operation.prepare(module, ForwardRequest(query=query), device, 2**62, rows))
    batch = batches.Batch(tuple(jobs), tuple((index,) for index in range(sessions)), jobs[0].prepared.plan)
    with cuda.counted() as counts:
        found = batch.run(device.torch)
    assert [fields["output"].shape for fields in found] == [(1, 1, module.sizes.d_model)] * sessions
    return counts


def _decoder(cuda, **spec):
    return cuda.module("bfloat16", d_model=1024, num_heads=32, num_kv_heads=8, head_dim=128, spec=CAUSAL | spec)


def test_64_steps_are_one_call_of_the_kernel_with_one_copy_back(cuda):
    device = cuda.device()
    counts = _steps(cuda, _decoder(cuda), device, 64, 8191)
    assert counts.launches["_flash_attention_forward"] == 1
    assert counts.launches.total() <= 8
    assert [each.blocking for each in counts.downloads] == [False]
    assert not counts.blocking_uploads
    tables = [each for each in counts.uploads if each.place.startswith("core/tensors")]
    assert len(tables) == 3  # tokens; slots of the new ones; borders, lengths and block table
    assert len(counts.waits) == 1
    assert not counts.mixed


def test_a_rotation_costs_steps_no_copy_and_no_wait_more(cuda):
    device = cuda.device()
    counts = _steps(cuda, _decoder(cuda, position={"name": "rope"}), device, 64, 8191)
    assert counts.launches["_flash_attention_forward"] == 1
    assert len(counts.downloads) == len(counts.waits) == 1


@pytest.mark.sampled(position=1)
@pytest.mark.parametrize("position", ["alibi", "relative_bias"])
def test_a_bias_of_each_pair_makes_no_step_wait_for_itself(cuda, position):
    counts = _steps(cuda, _decoder(cuda, position={"name": position}), cuda.device(), 4, 1000)
    assert not counts.blocking_uploads
    assert len(counts.downloads) == len(counts.waits) == 1


def test_steps_over_two_slabs_are_two_calls(cuda):
    device = cuda.device()
    counts = _steps(cuda, _decoder(cuda), device, 64, 1000, slabs=2)
    assert counts.launches["_flash_attention_forward"] == 2
    assert len(counts.downloads) == len(counts.waits) == 1
    assert not counts.blocking_uploads
    assert counts.launches.total() <= 20


def test_a_session_alone_takes_as_few(cuda):
    device = cuda.device()
    counts = _steps(cuda, _decoder(cuda), device, 1, 8191)
    assert counts.launches["_flash_attention_forward"] == 1
    assert counts.launches.total() <= 8
    assert len(counts.downloads) == len(counts.waits) == 1
