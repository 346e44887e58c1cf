"""Sessions on a GPU: what their steps and the pasts that they are given make the GPU and the host do."""

import torch

from attention_contract.schemas.sessions import FullPolicy
from attention_service.runtime.sessions.block_table import BlockTable
from attention_service.runtime.sessions.decode_session import DecodeSession, page_kind
from attention_service.runtime.sessions.pages import PagePool
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
