"""Sessions under pressure: memory, time, failures, and modules that change while sessions live."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.sessions.session_tree import D_MODEL, close, create, running, uncached

from attention_contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LengthMismatch,
    ModuleNotFound,
    OverBudget,
    Overloaded,
    SessionGone,
    SessionNotFound,
    VersionMismatch,
)
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import ReplaceParameters
from attention_contract.schemas.server import CallerLimits
from attention_contract.schemas.sessions import (
    ForkSession,
    ListSessions,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionWeightsRequest,
    StepRequest,
    StepsRequest,
    TruncateSession,
)
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.core.kv_cache.slab import PAGE_TOKENS
from attention_service.core.tensors import to_numpy
from attention_service.engine import Engine
from attention_service.runtime.callers import ANYONE, Caller, caller
from attention_service.runtime.sessions import decode_session, session_registry, step_operation
from attention_service.runtime.sessions import step as step_module
from attention_service.runtime.sessions.decode_session import DecodeSession

ROPE = {"masks": [{"name": "causal"}], "position": {"name": "rope"}}
PAGE_BYTES = PAGE_TOKENS * 2 * (4 + 4) * 8
"""Of the module ``m``: two key/value heads of width 4 in float64."""
MOST_OF_A_STEP = 180
"""Functions of the service that a step of one token passes, at most."""


@pytest.fixture
async def engine(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """An engine with the module ``m``."""
    async with running(tmp_path, **getattr(request, "param", {})) as engine:
        await create(engine, "m", ROPE)
        yield engine


def holding(*, pages: int, **settings: Any) -> pytest.MarkDecorator:
    """Let the sessions of a test's engine hold so many pages."""
    settings |= {"session_share": pages * PAGE_BYTES / 2**28}
    return pytest.mark.parametrize("engine", [settings], indirect=True, ids=["small"])


async def opened(engine: Engine, **fields: Any) -> str:
    """The id of a new session."""
    return (await engine.sessions.open("m", validate(OpenSession, fields))).session


async def step(engine: Engine, ident: str, x: Array, **fields: Any) -> Any:
    """Step by tokens ``[B, L, d]``."""
    return await engine.sessions.step(ident, validate(StepRequest, {"query": x} | fields))


def tokens(count: int, seed: int = 0) -> Array:
    """Tokens ``[1, count, d]``."""
    return np.random.default_rng(seed).standard_normal((1, count, D_MODEL))


async def test_many_sessions_in_one_pass_get_what_each_gets_alone(engine):
    lengths = [0, 1, 3, 64, 65, 130]
    whole = [tokens(length + 2, seed) for seed, length in enumerate(lengths)]
    ids = [await opened(engine) for _ in lengths]
    forks = []
    for ident, x, length in zip(ids, whole, lengths, strict=True):
        if length:
            await step(engine, ident, x[:, :length])
        forks.append((await engine.sessions.fork(ident, ForkSession())).session)
    alone = [await step(engine, ident, x[:, -2:]) for ident, x in zip(forks, whole, strict=True)]
    requests = [{"session": ident, "query": x[:, -2:]} for ident, x in zip(ids, whole, strict=True)]
    together = await engine.sessions.steps(validate(StepsRequest, {"steps": requests}))
    assert {reply.ran.batch for reply in together.steps} == {len(lengths)}
    for x, one, reply in zip(whole, alone, together.steps, strict=True):
        close(reply.output, one.output)
        close(reply.output, (await uncached(engine, "m", x, x.shape[1] - 2)).output)


async def test_steps_with_keys_and_values_of_their_own_join_too(engine):
    x, keys, values = (np.concatenate([tokens(5, seed + row) for row in range(3)]) for seed in (0, 10, 20))
    joined: list[int] = []
    for names in (["key"], ["key", "value"]):
        three = {"query": x, "key": keys, "value": values}
        sent = {name: three[name] for name in ["query", *names]}
        ids = [await opened(engine) for _ in x]
        found = []
        for start, stop in [(0, 3), (3, 4), (4, 5)]:
            requests = [
                {name: each[row : row + 1, start:stop] for name, each in sent.items()} | {"session": ident}
                for row, ident in enumerate(ids)
            ]
            replies = (await engine.sessions.steps(validate(StepsRequest, {"steps": requests}))).steps
            assert {reply.ran.kernel for reply in replies} == {"in_place"}
            joined.append(max(reply.ran.batch for reply in replies))
            found.append(np.concatenate([reply.output for reply in replies]))
        expected = await engine.forward("m", validate(ForwardRequest, sent))
        close(np.concatenate(found, 1), expected.output)
        short = {"key": keys[:1, :2], "value": values[:1, :2]}  # fewer keys than queries
        apart = await step(engine, ids[0], x[:1, :3], **short)
        assert apart.length == 7
        assert apart.ran.kernel != "in_place"
    assert max(joined) > 1


async def test_padding_on_the_left_keeps_its_places(engine):
    x, pads = np.concatenate([tokens(9, seed) for seed in (1, 2)]), [0, 3]
    ident = await opened(engine, sequences=2)
    real = np.arange(9) >= np.array(pads)[:, None]
    places = np.maximum(np.arange(9) - np.array(pads)[:, None], 0)
    found, kernels = [], []
    for start, stop in [(0, 5), (5, 6), (6, 9)]:
        fields = {"key_mask": real[:, :stop], "positions": places[:, start:stop]}
        reply = await step(engine, ident, x[:, start:stop], **fields)
        found.append(reply.output)
        kernels.append(reply.ran.kernel == "in_place")
    assert kernels == [False, True, True], "a query of padding sees no key"
    for row, pad in enumerate(pads):
        alone = await uncached(engine, "m", x[row : row + 1, pad:], 0)
        close(np.concatenate(found, 1)[row, pad:], alone.output[0])


@pytest.mark.sampled(hidden=2)
@pytest.mark.parametrize("hidden", [(0, 3), (70, 129), (5, 140), (140, 140)])
async def test_padding_is_hidden_in_place_and_other_masks_are_not_forgotten(hidden, engine):
    """Sessions of the same lengths have equal plans; what each hides is its own."""
    x = np.concatenate([tokens(142, seed) for seed in (1, 2)])
    place = np.arange(142)
    real = place >= np.array(hidden)[:, None]
    gap = (place < 1) | (place > 7)
    for mask, in_place in ((real, True), (np.stack([gap, gap]), False), (real, True)):
        ident = await opened(engine, sequences=2)
        await step(engine, ident, x[:, :140])
        for at in (140, 141):
            reply = await step(engine, ident, x[:, at : at + 1], key_mask=mask[:, : at + 1])
            assert (reply.ran.kernel == "in_place") == in_place
            exact = await uncached(engine, "m", x[:, : at + 1], at, key_mask=mask[:, : at + 1])
            close(reply.output, exact.output)


# ── shared prefixes ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_equal_prefixes_are_held_once(engine):
    x = tokens(2 * PAGE_TOKENS + 3)
    ids = [await opened(engine, share=True) for _ in range(3)]
    await step(engine, ids[0], x)
    for token in range(x.shape[1]):
        await step(engine, ids[1], x[:, token : token + 1])
    await step(engine, ids[2], x[:, :70])
    assert engine.sessions.pool.pages == 2 + 3
    assert engine.sessions.pool.shared_pages == 2
    apart = await opened(engine)
    await step(engine, apart, x)
    assert engine.sessions.pool.pages == 2 + 3 + 3
    expected = await uncached(engine, "m", np.concatenate([x, x[:, :1]], 1), x.shape[1])
    for ident in [*ids[:2], apart]:
        close((await step(engine, ident, x[:, :1])).output, expected.output)


@pytest.mark.sampled(hidden=2)
@pytest.mark.parametrize("hidden", ["key_mask", "key_lengths", "edits", "key", "parameters", "positions"])
async def test_what_changes_keys_is_not_shared(engine, hidden: str):
    """A session that cached other keys for the same query gives none of them to another."""
    x, more = tokens(PAGE_TOKENS), tokens(1, 5)
    weights = {name: to_numpy(value) for name, value in engine.modules.get("m").parameters.items()}
    fields = {
        "key_mask": {"key_mask": np.arange(PAGE_TOKENS)[None] != 5},
        "key_lengths": {"key_lengths": np.array([PAGE_TOKENS - 1])},
        "edits": {"edits": [{"tap": "v", "keys": [2], "set": 0.0}]},
        "key": {"key": tokens(PAGE_TOKENS, 7)},
        "parameters": {"parameters": {"v_proj.weight": 2 * weights["v_proj.weight"]}},
        "positions": {"positions": np.arange(PAGE_TOKENS)[None] * 2},
    }[hidden]
    first, second = [await opened(engine, share=True) for _ in range(2)]
    await step(engine, first, x, **fields)
    await step(engine, second, x)
    expected = await uncached(engine, "m", np.concatenate([x, more], 1), PAGE_TOKENS)
    close((await step(engine, second, more)).output, expected.output)


async def test_a_truncated_page_is_not_found_by_its_former_content(engine):
    x, other = tokens(PAGE_TOKENS), tokens(PAGE_TOKENS, 1)
    first, second = [await opened(engine, share=True) for _ in range(2)]
    await step(engine, first, x)
    await engine.sessions.truncate(first, TruncateSession(length=8))
    await step(engine, first, other[:, 8:])
    await step(engine, second, x)
    expected = await uncached(engine, "m", np.concatenate([x, x[:, :1]], 1), PAGE_TOKENS)
    close((await step(engine, second, x[:, :1])).output, expected.output)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@holding(pages=3, session_pinned_share=0.5)
async def test_the_least_recently_used_session_is_evicted(engine):
    first, second, pinned = await opened(engine), await opened(engine), await opened(engine, pinned=True)
    for ident in (pinned, second, first):
        await step(engine, ident, tokens(PAGE_TOKENS))
    third = await opened(engine)
    await step(engine, third, tokens(1))
    with pytest.raises(SessionGone) as gone:
        engine.sessions.info(second)
    assert gone.value.facts["reason"] == "evicted"
    assert engine.sessions.info(first).length == PAGE_TOKENS
    assert engine.sessions.registry.counts["evicted"] == 1
    await step(engine, third, tokens(PAGE_TOKENS))  # evicts the other one
    assert {session.id for session in engine.sessions.registry.live} == {third, pinned}


@holding(pages=4, session_pinned_share=0.5)
async def test_nothing_is_evicted_for_what_does_not_fit_anyway(engine):
    idle, pinned, third = await opened(engine), await opened(engine, pinned=True), await opened(engine)
    await step(engine, pinned, tokens(2 * PAGE_TOKENS))
    await step(engine, idle, tokens(1))
    with pytest.raises(Overloaded, match="do not fit"):
        await step(engine, third, tokens(3 * PAGE_TOKENS))
    with pytest.raises(OverBudget, match="ATTENTION_SESSION_SHARE"):
        await step(engine, third, tokens(5 * PAGE_TOKENS))
    assert engine.sessions.info(idle).length == 1
    assert engine.sessions.info(third).length == 0


@holding(pages=6, session_pinned_share=1.0)
async def test_forks_whose_pages_stay_are_not_evicted(engine):
    prompt, idle = await opened(engine, pinned=True), await opened(engine)
    await step(engine, prompt, tokens(4 * PAGE_TOKENS))
    forks = [(await engine.sessions.fork(prompt, ForkSession())).session for _ in range(5)]
    await step(engine, idle, tokens(PAGE_TOKENS))
    third = await opened(engine)
    with pytest.raises(Overloaded, match="do not fit"):
        await step(engine, third, tokens(3 * PAGE_TOKENS))
    assert {each.id for each in engine.sessions.registry.live} == {prompt, idle, third, *forks}
    await step(engine, third, tokens(2 * PAGE_TOKENS))
    assert {each.id for each in engine.sessions.registry.live} == {prompt, third, *forks}


@holding(pages=4)
async def test_forks_leave_together_where_only_that_frees_memory(engine):
    prompt = await opened(engine)
    await step(engine, prompt, tokens(3 * PAGE_TOKENS))
    for _ in range(3):
        await engine.sessions.fork(prompt, ForkSession())
    third = await opened(engine)
    await step(engine, third, tokens(2 * PAGE_TOKENS))
    assert [each.id for each in engine.sessions.registry.live] == [third]


async def test_sums_follow_what_each_session_holds(engine):
    registry = engine.sessions.registry
    ident = await opened(engine, pinned=True, capacity=2 * PAGE_TOKENS)
    await step(engine, ident, tokens(5), step="one")
    fork = (await engine.sessions.fork(ident, ForkSession())).session
    await engine.sessions.reorder(fork, ReorderSession(rows=[0, 0]))
    await step(engine, fork, np.repeat(tokens(PAGE_TOKENS), 2, 0))
    await engine.sessions.truncate(ident, TruncateSession(length=2))
    cache = await engine.sessions.cache(ident)
    past = {"past_key": cache.past_key, "past_value": cache.past_value}
    await engine.sessions.replace_cache(ident, validate(ReplaceCache, past))
    with pytest.raises(InvalidRequest):
        await opened(engine, capacity=1, **past)
    found = {each.id: each for each in registry.live}
    assert registry.totals.pinned == found[ident].bytes == 2 * PAGE_BYTES
    assert registry.totals.of_owner.total() == found[ident].bytes + found[fork].bytes


# ── replies of named steps ───────────────────────────────────────────────────────────────────────────────────────────

LARGE: Any = {"step": "large", "return": ["output", "weights"]}


async def test_a_large_reply_is_not_kept_and_comes_again(engine):
    ident, x = await opened(engine), tokens(150)
    await step(engine, ident, x[:, :20])
    first = await step(engine, ident, x[:, 20:140], at=20, **LARGE)
    fork = (await engine.sessions.fork(ident, ForkSession())).session
    assert engine.sessions.registry.reply_bytes == 0
    with pytest.raises(LengthMismatch):
        await step(engine, ident, x[:, 20:140], at=140, **LARGE)
    assert engine.sessions.info(ident).length == 140
    for _ in range(2):
        again = await step(engine, ident, x[:, 20:140], at=20, **LARGE)
        assert again.length == engine.sessions.info(ident).length == 140
        close(again.output, first.output)
        close(again.weights, first.weights)
    for each in (ident, fork):
        close((await step(engine, each, x[:, 140:])).output, (await uncached(engine, "m", x, 140)).output)


async def test_a_small_reply_is_kept_and_counts_as_its_sessions(engine):
    ident = await opened(engine)
    first = await step(engine, ident, tokens(3), step="small")
    assert await step(engine, ident, tokens(3), step="small") is first
    kept = engine.sessions.registry.reply_bytes
    assert kept == first.output.nbytes
    assert engine.sessions.registry.totals.of_owner.total() == PAGE_BYTES + kept
    await step(engine, ident, tokens(3))
    assert engine.sessions.registry.totals.of_owner.total() == PAGE_BYTES


async def test_a_large_reply_of_a_policy_that_dropped_tokens_is_refused_and_appends_nothing(engine):
    ident = await opened(engine, policy={"name": "window_sinks", "window": 4})
    await step(engine, ident, tokens(150), at=0, **LARGE)
    with pytest.raises(LengthMismatch, match="too large to be kept") as refused:
        await step(engine, ident, tokens(150), at=0, **LARGE)
    assert refused.value.param == "step"
    assert engine.sessions.info(ident).length == 150


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@holding(pages=4, session_pinned_share=0.5)
async def test_pinned_sessions_have_a_quota(engine):
    pinned = await opened(engine, pinned=True)
    await step(engine, pinned, tokens(2 * PAGE_TOKENS))
    with pytest.raises(Overloaded, match="without pinned"):
        await step(engine, pinned, tokens(1))
    with pytest.raises(Overloaded, match="without pinned"):
        await opened(engine, pinned=True, capacity=1)
    assert engine.sessions.info(pinned).length == 2 * PAGE_TOKENS


@holding(pages=4, session_pinned_share=1.0)
async def test_capacity_is_reserved_at_opening_and_after_a_fork(engine):
    x = tokens(100)
    sure = await opened(engine, capacity=100, pinned=True)
    assert engine.sessions.pool.pages == 2
    await step(engine, sure, x[:, :10])
    fork = (await engine.sessions.fork(sure, ForkSession())).session
    greedy = await opened(engine, pinned=True)
    with pytest.raises(Overloaded):
        await step(engine, greedy, tokens(PAGE_TOKENS * 2))
    await step(engine, greedy, tokens(PAGE_TOKENS))
    for start in range(10, 100, 30):
        await step(engine, sure, x[:, start : start + 30])
    with pytest.raises(InvalidRequest, match="capacity 100") as refused:
        await step(engine, sure, tokens(1))
    assert refused.value.param == "query"
    request = validate(SessionWeightsRequest, {"query": tokens(1)})
    assert (await engine.sessions.ask("weights", sure, request)).weights.shape[-1] == 101  # appends nothing
    close((await step(engine, fork, x[:, 10:11])).output, (await uncached(engine, "m", x[:, :11], 10)).output)


async def test_a_capacity_below_the_past_is_refused(engine):
    ident = await opened(engine, capacity=20)
    await step(engine, ident, tokens(10))
    cache = await engine.sessions.cache(ident)
    past = {"past_key": cache.past_key, "past_value": cache.past_value}
    for refused in (
        opened(engine, capacity=9, **past),
        opened(engine, capacity=9, **{"from": {"session": ident}}),
        engine.sessions.fork(ident, ForkSession(capacity=9)),
    ):
        with pytest.raises(InvalidRequest) as fault:
            await refused
        assert fault.value.param == "capacity"
    long = {name: np.concatenate([value] * 3, 2) for name, value in past.items()}
    with pytest.raises(InvalidRequest) as fault:
        await engine.sessions.replace_cache(ident, validate(ReplaceCache, long))
    assert fault.value.param == "past_key"
    assert engine.sessions.info(ident).length == 10
    assert len(engine.sessions.registry) == 1


@holding(pages=5)
async def test_a_reorder_that_does_not_fit_changes_nothing(engine):
    ident, x = await opened(engine, capacity=PAGE_TOKENS, sequences=2), np.concatenate([tokens(5), tokens(5, 1)])
    await step(engine, ident, x, step="one")
    with pytest.raises(OverBudget):
        await engine.sessions.reorder(ident, ReorderSession(rows=[1] * 9))
    info = engine.sessions.info(ident)
    assert (info.sequences, info.length, info.step) == (2, 5, "one")
    await engine.sessions.reorder(ident, ReorderSession(rows=[1, 1, 0]))
    again = np.concatenate([x[[1, 1, 0]], x[[0, 1, 0], :1]], 1)
    close((await step(engine, ident, again[:, 5:])).output, (await uncached(engine, "m", again, 5)).output)


async def test_the_list_comes_in_pages_that_hold_each_session_once(engine):
    ann, bob = Caller("ann", manages=False), Caller("bob", manages=False)
    opened_by: dict[str, list[str]] = {"ann": [], "bob": []}
    for who in (ann, bob, ann, ann, bob, ann, ann):
        caller.set(who)
        opened_by[who.name].append(await opened(engine))
    caller.set(ann)
    found, cursor = [], None
    while True:
        page = engine.sessions.listing(ListSessions(limit=2, cursor=cursor))
        assert page.total == len(opened_by["ann"]) - len(found) // 2
        found += [each.session for each in page.sessions]
        if page.next is None:
            break
        cursor = page.next
        await engine.sessions.delete(found[-1])  # the next page begins after it all the same
    assert found == opened_by["ann"]
    caller.set(ANYONE)
    assert engine.sessions.listing(ListSessions()).total == 2 + 3


async def test_growth_reads_no_other_session(engine, monkeypatch):
    caller.set(Caller("ann", limits=CallerLimits(sessions=50, session_bytes=2**20)))
    others = [await opened(engine, pinned=True) for _ in range(20)]
    ident, read = await opened(engine, pinned=True), set()
    held = DecodeSession.bytes.fget
    monkeypatch.setattr(DecodeSession, "bytes", property(lambda each: read.add(each.id) or held(each)))
    await step(engine, ident, tokens(PAGE_TOKENS))
    await step(engine, ident, tokens(1))
    assert read == {ident}
    assert len(engine.sessions.registry) == len(others) + 1


async def test_a_step_warns_where_earlier_keys_keep_the_angles_of_a_shorter_sequence(engine):
    ntk = {"name": "ntk", "factor": 4.0, "original_max_position_embeddings": 8}
    yarn = {"name": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    for name, scaling in (("ntk", ntk), ("yarn", yarn)):
        await create(engine, name, ROPE | {"position": {"name": "rope", "scaling": scaling}})
    x, found = tokens(20), {}
    for name in ("ntk", "yarn"):
        expected = (await uncached(engine, name, x, 0)).output
        for first in (6, 20):
            ident = (await engine.sessions.open(name, OpenSession())).session
            replies = [await step(engine, ident, part) for part in np.split(x, [first], 1) if part.shape[1]]
            differs = np.abs(replies[-1].output - expected[:, -replies[-1].output.shape[1] :]).max() > 1e-6
            found[name, first] = [reply.warning is not None for reply in replies], differs
            assert "original length of 8" in (replies[-1].warning or "the original length of 8")
    assert found == {
        ("ntk", 6): ([False, True], True),
        ("ntk", 20): ([False], False),
        ("yarn", 6): ([False, False], False),
        ("yarn", 20): ([False], False),
    }


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_expires_unless_a_request_comes(engine, monkeypatch):
    ahead = 0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    for module in (decode_session, session_registry):
        monkeypatch.setattr(module, "time", clock)
    short, kept = await opened(engine, ttl_s=60), await opened(engine, ttl_s=600)
    for _ in range(3):
        ahead += 40
        await step(engine, short, tokens(1))
    ahead += 80
    with pytest.raises(SessionGone) as gone:
        await step(engine, short, tokens(1))
    assert gone.value.facts["reason"] == "expired"
    assert [each.session for each in engine.sessions.listing(ListSessions()).sessions] == [kept]


async def test_a_deadline_that_has_passed_appends_nothing(engine):
    ident = await opened(engine)
    request = validate(StepRequest, {"query": tokens(3), "step": "late"})
    with pytest.raises(DeadlineExceeded):
        await engine.sessions.step(ident, request, time.monotonic() - 1)
    assert engine.sessions.info(ident).length == 0
    assert (await engine.sessions.step(ident, request)).length == 3
    assert (await engine.sessions.step(ident, request)).length == 3


async def test_a_session_that_is_deleted_during_a_step_gives_its_pages_back(engine):
    ident = await opened(engine)
    await step(engine, ident, tokens(PAGE_TOKENS))
    running = [asyncio.ensure_future(step(engine, ident, tokens(300), **{"return": ["weights"]})) for _ in range(2)]
    await asyncio.sleep(0)
    await engine.sessions.delete(ident)
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(ended[1], SessionGone)
    assert engine.sessions.pool.pages == 0
    with pytest.raises(SessionNotFound):
        engine.sessions.info("nobody")


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_keeps_the_version_that_it_was_opened_with(engine):
    x, ident = tokens(6), await opened(engine)
    await step(engine, ident, x[:, :3])
    held, old = engine.budget.capacity, engine.modules.get("m")
    parameters = {name: to_numpy(2 * value) for name, value in old.parameters.items()}
    await engine.modules.replace("m", validate(ReplaceParameters, {"parameters": parameters}))
    assert engine.budget.capacity == held - old.bytes
    close((await step(engine, ident, x[:, 3:5])).output, (await uncached(engine, "m", x[:, :5], 3)).output)
    with pytest.raises(VersionMismatch):
        await step(engine, ident, x[:, 5:], version=engine.modules.get("m").version)
    with pytest.raises(InvalidRequest, match="version"):
        await opened(engine, **{"from": {"session": ident}})
    await engine.modules.delete("m")
    fork = (await engine.sessions.fork(ident, ForkSession())).session
    await engine.sessions.delete(ident)
    close((await step(engine, fork, x[:, 5:])).output, (await uncached(engine, "m", x, 5)).output)
    with pytest.raises(ModuleNotFound):
        await opened(engine)
    await engine.sessions.delete(fork)
    assert engine.budget.capacity > held


async def test_new_weights_share_no_pages_with_old_ones(engine):
    x, first = tokens(PAGE_TOKENS), await opened(engine, share=True)
    await step(engine, first, x)
    parameters = {name: to_numpy(2 * value) for name, value in engine.modules.get("m").parameters.items()}
    await engine.modules.replace("m", validate(ReplaceParameters, {"parameters": parameters}))
    second = await opened(engine, share=True)
    await step(engine, second, x)
    request = validate(ForwardRequest, {"query": np.concatenate([x, x[:, :1]], 1)})
    expected = (await engine.forward("m", request)).output[:, PAGE_TOKENS:]
    close((await step(engine, second, x[:, :1])).output, expected)


@pytest.mark.parametrize(
    "policy", [{"name": "heavy_hitters", "heavy": 2, "window": 2}, {"name": "snap_kv", "keep": 3, "window": 2}]
)
async def test_heads_attend_to_what_was_kept_for_each(engine, policy):
    x = tokens(9, seed=1)
    ident = await opened(engine, policy=policy | {"report_error": True})
    await step(engine, ident, x[:, :6])
    cache = await engine.sessions.cache(ident)
    held = cache.past_key.shape[2]
    assert held == policy.get("heavy", policy.get("keep")) + policy["window"]
    whole = await engine.forward(
        "m", validate(ForwardRequest, {"query": x, "return": ["k", "v"], "select": {"heads": [0, 2]}})
    )
    for name, taps in (("past_key", whole.k), ("past_value", whole.v)):  # each head keeps tokens as they were
        kept = getattr(cache, name)
        difference = np.abs(kept[:, :, :, None] - taps[:, :, None, :6]).max(-1).min(-1)
        assert difference.max() < 1e-12
    body = {"query": x[:, 6:7], "past_key": cache.past_key, "past_value": cache.past_value}
    body |= {"positions": [[6]], "offsets": [held]}
    want = await engine.forward("m", validate(ForwardRequest, body))
    reply = await step(engine, ident, x[:, 6:7])
    np.testing.assert_allclose(reply.output, want.output, atol=1e-12)
    assert reply.error.max > 0
    assert engine.sessions.registry.get(ident).held == held + (policy["name"] == "snap_kv")
    fork = await engine.sessions.fork(ident, ForkSession())
    one, two = [await step(engine, each, x[:, 7:8]) for each in (ident, fork.session)]
    np.testing.assert_array_equal(one.output, two.output)


async def test_a_token_that_is_not_finite_harms_no_earlier_one(engine):
    x = tokens(6)
    spoilt = x.copy()
    spoilt[0, 3] = np.nan
    want = (await engine.forward("m", validate(ForwardRequest, {"query": x}))).output
    ident = await opened(engine)
    await step(engine, ident, x[:, :2])
    output = (await step(engine, ident, spoilt[:, 2:5])).output
    np.testing.assert_allclose(output[:, :1], want[:, 2:3], atol=1e-12)
    assert np.isnan(output[:, 1:]).all()


async def test_padding_is_hidden_whatever_steps_of_this_shape_came_before(engine):
    x = np.repeat(tokens(6), 2, axis=0)
    real = np.ones((2, 6), bool)
    real[1, :2] = False
    plain, padded = [await opened(engine, sequences=2) for _ in range(2)]
    want = (await engine.forward("m", validate(ForwardRequest, {"query": x, "key_mask": real}))).output
    for ident, mask in ((plain, {}), (padded, {"key_mask": real[:, :5]})):
        await step(engine, ident, x[:, :5], **mask)
    await step(engine, plain, x[:, 5:])
    output = (await step(engine, padded, x[:, 5:], key_mask=real)).output
    np.testing.assert_allclose(output, want[:, 5:], atol=1e-12)


async def test_a_long_step_over_a_past_is_cut_and_gives_the_same(engine, monkeypatch):
    x = tokens(150)
    monkeypatch.setattr(step_module, "CUT_PAIRS", 100)
    monkeypatch.setattr(step_module, "LEAST_PART", 50)
    want = (await engine.forward("m", validate(ForwardRequest, {"query": x}))).output
    ident, other = await opened(engine), await opened(engine)
    await step(engine, ident, x[:, :10])
    long = asyncio.create_task(step(engine, ident, x[:, 10:]))
    await step(engine, other, x[:, :1])
    reply = await long
    np.testing.assert_allclose(reply.output, want[:, 10:], atol=1e-12)
    assert reply.length == 150
    await step(engine, other, x[:, 1:2])
    with pytest.raises(InvalidRequest):
        await step(engine, ident, np.concatenate([x, x[..., :1]], axis=-1))
    assert engine.sessions.registry.get(ident).length == 150


@pytest.mark.parametrize("fault", [ZeroDivisionError(), torch.OutOfMemoryError("CUDA out of memory")])
async def test_a_step_that_breaks_its_pass_fails_alone_and_appends_nothing(engine, monkeypatch, fault):
    whole = [tokens(4, seed) for seed in range(5)]
    ids = [await opened(engine) for _ in whole]
    for ident, x in zip(ids, whole, strict=True):
        await step(engine, ident, x[:, :2])
    real, passes = step_operation.Steps.launch, []

    def fails(self: Any, uploaded: Any) -> Any:
        passes.append(sum(bound.batch for bound in self.bounds))
        if any((bound.arrays["query"] > 500).any() for bound in self.bounds):
            raise fault
        return real(self, uploaded)

    requests = [{"session": ident, "query": x[:, 2:3]} for ident, x in zip(ids, whole, strict=True)]
    requests[3]["query"] = whole[3][:, 2:3] + 1000
    with monkeypatch.context() as patch:
        patch.setattr(step_operation.Steps, "launch", fails)
        replies = (await engine.sessions.steps(validate(StepsRequest, {"steps": requests}))).steps
    assert max(passes) == len(ids)
    for number, (ident, x, reply) in enumerate(zip(ids, whole, replies, strict=True)):
        if number == 3:
            assert not hasattr(reply, "output")
            await step(engine, ident, x[:, 2:3], at=2)
        else:
            close(reply.output, (await uncached(engine, "m", x[:, :3], 2)).output)
        after = await step(engine, ident, x[:, 3:], at=3)
        close(after.output, (await uncached(engine, "m", x, 3)).output)


async def test_a_step_whose_bucket_is_planned_passes_few_functions(engine):
    for _ in range(2):
        ident = await opened(engine)
        for _ in range(3):
            await step(engine, ident, tokens(1))
    request, passed = validate(StepRequest, {"query": tokens(1)}), Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/attention_service/" in frame.f_code.co_filename:
            passed[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        await engine.sessions.step(ident, request)
    finally:
        sys.setprofile(None)
    assert passed.total() <= MOST_OF_A_STEP, passed.most_common()
