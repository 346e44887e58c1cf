"""Sessions as they are on a GPU: slabs that take their memory at once, and steps by the kernel for block tables."""

import logging

import numpy as np
import pytest
import torch
from tests.core.kv_cache.paged_flash import as_on_a_gpu, paged_flash
from tests.runtime.sessions.session_tree import D_MODEL, Tree, close, create, running, uncached

from attention_contract.errors import Overloaded
from attention_contract.schemas.sessions import ForkSession, OpenSession, StepRequest, StepsRequest
from attention_contract.validation import validate
from attention_service.core.kv_cache import pages
from attention_service.core.kv_cache.slab import PageKind
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling import batches
from attention_service.runtime.sessions import live_sessions, step_operation
from attention_service.runtime.sessions.decode_session import page_kind
from attention_service.runtime.sessions.step import writable

CAUSAL = {"masks": [{"name": "causal"}]}
ROPE = CAUSAL | {"position": {"name": "rope"}}
HALF = {"dtype": "bfloat16", "head_dim": 16}


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel."""
    as_on_a_gpu(monkeypatch)
    with paged_flash() as found:
        yield found


@pytest.fixture
async def engine(tmp_path, calls):
    """An engine whose slabs lie as the kernel reads them, with the module ``m``."""
    async with running(tmp_path) as engine:
        engine.sessions.pool.paged = True
        await create(engine, "m", ROPE, **HALF)
        yield engine


def tokens(count, seed):
    return np.random.default_rng(seed).standard_normal((1, count, D_MODEL)).astype(np.float32)


async def stepped(engine, ids, inputs):
    requests = [{"session": ident, "query": x} for ident, x in zip(ids, inputs, strict=True)]
    return (await engine.sessions.steps(validate(StepsRequest, {"steps": requests}))).steps


@pytest.mark.slow
async def test_steps_of_64_sessions_are_one_call(engine, calls, monkeypatch):
    monkeypatch.setattr(step_operation, "_PASS_S", 10.0)
    lengths, jobs, module = [1 + 8 * seed for seed in range(64)], [], engine.library.get("m")
    whole = [tokens(length + 1, seed) for seed, length in enumerate(lengths)]
    for x in whole:
        ident = (await engine.sessions.open("m", OpenSession(capacity=600))).session
        await engine.sessions.step(ident, validate(StepRequest, {"query": x[:, :-1]}))
        rows = tuple(writable(engine.sessions.registry.get(ident).tables, 1))
        request = validate(StepRequest, {"query": x[:, -1:]})
        jobs.append(step_operation.prepare(module, request, engine.device, 2**30, rows))
    calls.clear()
    found = batches.choose(jobs, spare=2**30).run(engine.device.torch)
    assert [(call.sequences, call.queries, call.grouped) for call in calls] == [(64, 1, True)]
    for fields, x in list(zip(found, whole, strict=True))[::7]:
        close(fields["output"], (await uncached(engine, "m", x, x.shape[1] - 1)).output, "bfloat16")


async def test_sessions_that_outgrow_a_slab_go_on_whole_in_another(engine, calls, monkeypatch):
    monkeypatch.setattr(pages, "LEAST_SLAB_BYTES", 1)
    ids = [(await engine.sessions.open("m", OpenSession())).session for _ in range(16)]
    inputs = [tokens(513, seed) for seed in range(16)]
    await stepped(engine, ids, [x[:, :512] for x in inputs])  # two pages each
    (slabs,) = engine.sessions.pool._slabs.values()
    assert [len(each.users) for each in slabs] == [2, 6, 24]
    calls.clear()
    replies = await stepped(engine, ids, [x[:, 512:] for x in inputs])
    assert sum(call.sequences for call in calls) == 16  # none by products
    for ident in ids:
        (table,) = engine.sessions.registry.get(ident).tables
        assert len({id(span.slab) for span in table.spans}) == 1
    for reply, x in zip(replies, inputs, strict=True):
        close(reply.output, (await uncached(engine, "m", x, 512)).output, "bfloat16")


async def test_a_fork_that_outgrows_its_slab_stays_beside_the_pages_that_it_shares(engine, calls, monkeypatch):
    monkeypatch.setattr(pages, "LEAST_SLAB_BYTES", 1)
    ident, x = (await engine.sessions.open("m", OpenSession())).session, tokens(513, 0)
    await stepped(engine, [ident], [x[:, :512]])
    fork = await engine.sessions.fork(ident, ForkSession())
    calls.clear()
    (reply,) = await stepped(engine, [fork.session], [x[:, 512:]])
    assert not calls  # its pages lie in two slabs
    assert engine.sessions.info(fork.session).shared_bytes == 2 * engine.sessions.pool.bytes // 3
    close(reply.output, (await uncached(engine, "m", x, 512)).output, "bfloat16")


async def test_a_session_that_outgrows_its_slab_takes_no_more_than_it_must_where_memory_is_short(engine, monkeypatch):
    monkeypatch.setattr(pages, "LEAST_SLAB_BYTES", 1)
    ident, x = (await engine.sessions.open("m", OpenSession())).session, tokens(513, 0)
    await stepped(engine, [ident], [x[:, :512]])
    page = page_kind(engine.library.get("m")).page_bytes
    monkeypatch.setattr(engine.sessions.pool, "_free_bytes", lambda: page)
    (reply,) = await stepped(engine, [ident], [x[:, 512:]])
    assert engine.sessions.pool.held == engine.sessions.pool.bytes == 3 * page
    close(reply.output, (await uncached(engine, "m", x, 512)).output, "bfloat16")


@pytest.mark.slow
async def test_trees_of_sessions_give_the_numbers_of_passes_without_a_cache(engine, calls):
    specs = (CAUSAL, ROPE, {"masks": [{"name": "causal"}, {"name": "sliding_window", "left": 5}]})
    for seed, spec in enumerate(specs):
        await create(engine, f"m{seed}", spec, **HALF)
        tree = Tree(engine, f"m{seed}", "bfloat16", np.random.default_rng(seed), longest=4)
        await tree.walk(8)
        await tree.end()
    assert calls


async def test_a_session_leaves_for_the_memory_that_another_kind_of_page_needs(engine, monkeypatch):
    """Its slab is held whole, and only a slab without pages gives memory back."""
    await create(engine, "other", CAUSAL, dtype="bfloat16", head_dim=32)
    first = (await engine.sessions.open("m", OpenSession(capacity=256))).session
    held = engine.sessions.pool.held
    assert held >= pages.LEAST_SLAB_BYTES // 2
    used = engine.budget.total - engine.budget.available
    monkeypatch.setattr(engine.budget, "total", used + 2**14)
    await engine.sessions.open("m", OpenSession(capacity=1024))  # in the same slab
    assert engine.sessions.pool.held == held
    await engine.sessions.open("other", OpenSession(capacity=1024))
    assert engine.sessions.registry.counts["evicted"] == 2
    assert engine.sessions.pool.held <= held + 2**14
    assert engine.budget.available >= 0
    assert first not in {session.id for session in engine.sessions.registry.live}


async def test_a_device_without_memory_for_pages_is_overloaded(engine, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    ident, x = (await engine.sessions.open("m", OpenSession())).session, tokens(257, 0)
    await stepped(engine, [ident], [x[:, :256]])
    held = engine.sessions.pool.held
    monkeypatch.setattr(pages, "LEAST_SLAB_BYTES", 1)
    monkeypatch.setattr(pages.Slab, "of", full)
    long = np.concatenate([x] * 600, 1)
    with pytest.raises(Overloaded, match="the device has no memory"):
        await engine.sessions.step(ident, validate(StepRequest, {"query": long}))
    assert engine.sessions.info(ident).length == 256
    assert engine.sessions.pool.held == held
    assert (await stepped(engine, [ident], [x[:, 256:]]))[0].length == 257


async def test_a_trial_that_fails_with_its_device_decides_nothing(engine, monkeypatch):
    def broken(self):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(engine.device, "is_cuda", True)
    monkeypatch.setattr(Device, "await_parameters", lambda self: None)
    monkeypatch.setattr(Device, "probe", broken)
    monkeypatch.setattr(live_sessions, "paged_fault", lambda device: "CUBLAS_STATUS_EXECUTION_FAILED")
    with pytest.raises(RuntimeError, match="CUBLAS"):
        await engine.sessions.choose_kernel()


@pytest.mark.parametrize("fault", [None, "no such kernel"])
async def test_a_trial_at_the_start_chooses_the_kernel(engine, monkeypatch, caplog, fault):
    engine.sessions.pool.paged = False
    await engine.sessions.choose_kernel()
    assert engine.sessions.kernel == "products"  # on a CPU
    tried = []
    monkeypatch.setattr(engine.device, "is_cuda", True)
    monkeypatch.setattr(Device, "await_parameters", lambda self: None)
    monkeypatch.setattr(live_sessions, "paged_fault", lambda device: tried.append(device) or fault)
    with caplog.at_level(logging.INFO):
        await engine.sessions.choose_kernel()
    assert tried == [torch.device("cpu")]
    assert engine.sessions.kernel == ("products" if fault else "paged")
    assert "kernel for block tables" in caplog.text
    assert (fault or "") in caplog.text


def test_40_kinds_of_pages_take_little_more_than_their_sessions(monkeypatch):
    pool = pages.PagePool(limit=2**35)
    kinds = [PageKind(8, 64, 64 + 8 * index, torch.bfloat16, torch.device("meta")) for index in range(40)]
    taken = [pool.take(kind, 4) for kind in kinds]
    assert pool.held == sum(part.slab.grain_bytes for each in taken for part in each)
    assert pool.held <= 40 * pages.LEAST_SLAB_BYTES
    monkeypatch.setattr(pages, "LEAST_SLAB_BYTES", 1)
    for kind in kinds:
        pool.take(kind, 1000)
    assert pool.held <= 40 * pages.LEAST_SLAB_BYTES + 2 * sum(1004 * kind.page_bytes for kind in kinds)
