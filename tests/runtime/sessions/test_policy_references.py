"""Policies of sessions against references that follow the papers token by token, in float64."""

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tests.runtime.sessions.session_tree import D_MODEL, create, running

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.sessions import (
    ForkSession,
    OpenSession,
    Policy,
    ReorderSession,
    StepRequest,
    TruncateSession,
)
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.core.kv_cache.policies import Keeper, keeper_of
from attention_service.engine import Engine

CAUSAL = {"masks": [{"name": "causal"}]}
POLICIES = {
    "window_sinks": {"name": "window_sinks", "sinks": 2, "window": 3},
    "heavy_hitters": {"name": "heavy_hitters", "heavy": 3, "window": 2},
    "snap_kv": {"name": "snap_kv", "keep": 3, "window": 2, "kernel": 3},
}
B, HEADS, KV_HEADS = 2, 4, 2
PLANS = [[1] * 12, [7, 1, 1, 4, 1], [20, 1, 2], [1, 2, 9]]
"""Tokens of each step."""


def keeper_or_none(policy: dict[str, Any], spec: dict[str, Any]) -> Keeper | None:
    """The state of a policy for a spec; None for ``full``."""
    parsed: Policy = TypeAdapter(Policy).validate_python(policy)
    return keeper_of(parsed, validate(AttentionSpec, spec), KV_HEADS, HEADS)


def keeper(name: str) -> Keeper:
    """The state of a policy of ``POLICIES`` for a causal module."""
    found = keeper_or_none(POLICIES[name], CAUSAL)
    assert found is not None
    return found


def weights_of(rng: np.random.Generator, held: int, new: int) -> Array:
    """Causal weights ``[B, H, new, held + new]`` whose rows sum to 1."""
    weights = rng.exponential(size=(B, HEADS, new, held + new)) ** 3
    weights *= np.tri(new, held + new, held)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


class Held:
    """The tokens that one head of one sequence holds, by their places, dropped by the rules of the papers."""

    def __init__(self, policy: dict[str, Any]) -> None:
        self.policy = policy
        self.tokens: list[int] = []
        self.scores: dict[int, float] = {}
        self.length = 0
        self.prefilled = False

    def step(self, rows: list[list[float]]) -> None:
        """Append a token for each row of weights over all that is held, then drop. rows[q][k] sums the group's."""
        self.tokens += range(self.length, self.length + len(rows))
        self.length += len(rows)
        getattr(self, self.policy["name"])(rows)

    def window_sinks(self, rows: list[list[float]]) -> None:
        first, last = self.policy["sinks"], self.length - self.policy["window"]
        self.tokens = [token for token in self.tokens if token < first or token >= last]

    def heavy_hitters(self, rows: list[list[float]]) -> None:
        for row in rows:
            for token, weight in zip(self.tokens, row, strict=True):
                self.scores[token] = self.scores.get(token, 0.0) + weight
        while len(self.tokens) > self.policy["heavy"] + self.policy["window"]:
            old = [token for token in self.tokens if token < self.length - self.policy["window"]]
            self.tokens.remove(min(old, key=self.scores.__getitem__))

    def snap_kv(self, rows: list[list[float]]) -> None:
        if self.prefilled or len(self.tokens) <= self.policy["keep"] + self.policy["window"]:
            self.prefilled = True
            return
        self.prefilled = True
        prefix = len(self.tokens) - self.policy["window"]
        votes = [sum(row[key] for row in rows[-self.policy["window"] :]) for key in range(prefix)]
        reach = self.policy["kernel"] // 2
        pooled = [max(votes[max(key - reach, 0) : key + reach + 1]) for key in range(prefix)]
        best = sorted(range(prefix), key=lambda key: (-pooled[key], key))[: self.policy["keep"]]
        self.tokens = sorted(best) + list(range(prefix, len(self.tokens)))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_each_head_of_each_sequence_keeps_the_tokens_of_the_paper(name, plan, rng):
    state = keeper(name)
    heads = [[Held(POLICIES[name]) for _ in range(KV_HEADS)] for _ in range(B)]
    for new in plan:
        held = len(heads[0][0].tokens)
        weights = weights_of(rng, held, new)
        before = torch.tensor([[head.tokens + list(range(head.length, head.length + new)) for head in row]
                               for row in heads])  # fmt: skip
        for b, row in enumerate(heads):
            for h, head in enumerate(row):
                group = weights[b, h * HEADS // KV_HEADS : (h + 1) * HEADS // KV_HEADS]
                head.step([[sum(float(w) for w in group[:, q, k]) for k in range(held + new)] for q in range(new)])
        wanted = state.wants(new, held)
        seen = None if wanted is None else torch.from_numpy(weights[:, :, wanted])
        kept = state.after_step(seen, held, new)
        found = before if kept is None else before.gather(-1, kept.expand(B, KV_HEADS, -1))
        assert found.tolist() == [[head.tokens for head in row] for row in heads]


@pytest.mark.parametrize("name", POLICIES)
def test_half_weights_are_added_without_loss(name, rng):
    def kept(dtype: torch.dtype) -> torch.Tensor:
        state = keeper(name)
        wanted = state.wants(30, 0)
        found = state.after_step(None if wanted is None else weights[:, :, wanted].to(dtype), 0, 30)
        assert found is not None
        return found

    weights = torch.from_numpy(weights_of(rng, 0, 30)).to(torch.bfloat16)
    assert torch.equal(kept(torch.bfloat16), kept(torch.float64))


def test_equal_sums_keep_the_earlier_tokens():
    state = keeper("heavy_hitters")
    kept = state.after_step(torch.ones(B, HEADS, 1, 9), 8, 1)
    assert kept is not None
    assert kept.unique(dim=1).flatten(0, 1).unique(dim=0).tolist() == [[0, 1, 2, 7, 8]]


def test_a_fork_and_reordered_rows_keep_their_own_scores(rng):
    state = keeper("heavy_hitters")
    state.after_step(torch.from_numpy(weights_of(rng, 0, 5)), 0, 5)
    fork, swapped = state.copy(), state.copy()
    swapped.reorder([1, 0, 1])
    weights = torch.from_numpy(weights_of(rng, 5, 3))
    first = state.after_step(weights, 5, 3)
    again = fork.after_step(weights, 5, 3)
    moved = swapped.after_step(weights[[1, 0, 1]], 5, 3)
    assert first is not None
    assert again is not None
    assert moved is not None
    assert torch.equal(first, again)
    assert torch.equal(moved, first[[1, 0, 1]])


def test_truncation_is_refused_once_it_would_need_a_dropped_token():
    sinks, heavy, snap = (keeper(name) for name in ("window_sinks", "heavy_hitters", "snap_kv"))
    sinks.after_step(None, 0, 5)
    sinks.truncate(2, 5, 5)  # nothing dropped yet
    sinks.after_step(None, 3, 6)
    heavy.after_step(torch.ones(1, HEADS, 1, 3), 2, 1)
    snap.after_step(torch.ones(1, HEADS, 2, 9), 0, 9)
    snap.after_step(None, 5, 4)
    snap.truncate(4, 9, 13)  # down to the end of the prefill
    for state, dropped, held, length in ((sinks, 1, 5, 9), (heavy, 1, 3, 3), (snap, 1, 5, 9)):
        state.truncate(0, held, length)
        with pytest.raises(InvalidRequest, match="fork the session") as raised:
            state.truncate(dropped, held, length)
        assert raised.value.param == "length"


def test_a_prefill_that_was_taken_back_whole_comes_again():
    state = keeper("snap_kv")
    assert state.after_step(torch.ones(1, HEADS, 2, 4), 0, 4) is None
    state.truncate(4, 4, 4)
    assert state.wants(9, 0) == slice(7, 9)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"position": {"name": "alibi"}}, "position alibi"),
        ({"position": {"name": "relative_bias", "num_buckets": 8, "max_distance": 16}}, "position relative_bias"),
        ({"masks": [{"name": "causal"}, {"name": "sliding_window", "left": 3}]}, "mask sliding_window"),
        ({"masks": [{"name": "causal"}], "method": {"name": "linear"}}, "method linear"),
        ({"add_zero_attn": True}, "keys that it adds"),
    ],
)
def test_specs_that_count_places_between_tokens_are_refused(name, spec, part):
    with pytest.raises(InvalidRequest, match=part) as raised:
        keeper_or_none(POLICIES[name], spec)
    assert raised.value.param == "policy"
    assert keeper_or_none({"name": "full"}, spec) is None


# ── in sessions ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine with the rotary module ``m``."""
    async with running(tmp_path) as engine:
        await create(engine, "m", CAUSAL | {"position": {"name": "rope"}})
        yield engine


async def uncached_outputs(engine: Engine, x: Array, plan: list[int], policy: dict[str, Any]) -> tuple[Array, int]:
    """Outputs ``[1, L, d]`` by masks that hide what the policy has dropped, and the tokens that it holds at the end."""
    sizes = engine.library.get("m").sizes
    group = sizes.heads // sizes.kv_heads
    heads = [Held(policy) for _ in range(sizes.kv_heads)]
    length = x.shape[1]
    mask = np.zeros((1, sizes.heads, length, length), bool)
    output = np.zeros(0)
    for start, stop in pairwise([0, *np.cumsum(plan).tolist()]):
        for h, head in enumerate(heads):
            for query in range(start, stop):
                seen = head.tokens + list(range(start, query + 1))
                mask[0, h * group : (h + 1) * group, query, seen] = True
        request = validate(ForwardRequest, {"query": x, "mask": mask, "return": ["output", "weights"]})
        reply = await engine.forward("m", request)
        output, weights = np.asarray(reply.output), np.asarray(reply.weights)
        for h, head in enumerate(heads):
            keys = head.tokens + list(range(start, stop))
            rows = weights[0, h * group : (h + 1) * group, start:stop][..., keys].sum(0)
            head.step(rows.tolist())
    return output, len(heads[0].tokens)


@pytest.mark.sampled
@pytest.mark.parametrize("plan", [[1] * 14, [9, 1, 3, 1]], ids=str)
@pytest.mark.parametrize("name", POLICIES)
async def test_steps_equal_a_forward_pass_that_masks_what_the_policy_dropped(name, plan, engine, rng):
    x = rng.standard_normal((1, sum(plan), D_MODEL))

    wide, held = await uncached_outputs(engine, x, plan, POLICIES[name])
    opened = await engine.sessions.open("m", validate(OpenSession, {"policy": POLICIES[name] | {"report_error": True}}))
    full = await engine.forward("m", validate(ForwardRequest, {"query": x}))
    for start, stop in pairwise([0, *np.cumsum(plan).tolist()]):
        reply = await engine.sessions.step(opened.session, validate(StepRequest, {"query": x[:, start:stop]}))
        np.testing.assert_allclose(reply.output, wide[:, start:stop], rtol=1e-9, atol=1e-11)
        whole = np.abs(np.asarray(full.output)[:, start:stop] - wide[:, start:stop])
        assert reply.error is not None
        assert reply.error.max == pytest.approx(whole.max(), rel=1e-6, abs=1e-11)
    info = engine.sessions.info(opened.session)
    assert (info.length, info.held) == (sum(plan), held)


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", POLICIES)
async def test_sequences_forks_and_beams_go_on_as_sessions_of_their_own(name, engine, rng):
    x = rng.standard_normal((2, 14, D_MODEL))

    async def opened(**fields: Any) -> str:
        return (await engine.sessions.open("m", validate(OpenSession, fields | {"policy": POLICIES[name]}))).session

    async def step(ident: str, tokens: Array) -> Array:
        reply = await engine.sessions.step(ident, validate(StepRequest, {"query": tokens}))
        return np.asarray(reply.output)

    both, single = await opened(sequences=2), [await opened(), await opened()]
    for part in (slice(0, 9), slice(9, 10)):
        alone = [await step(ident, x[row : row + 1, part]) for row, ident in enumerate(single)]
        np.testing.assert_allclose(await step(both, x[:, part]), np.concatenate(alone), rtol=1e-9, atol=1e-11)
    fork = (await engine.sessions.fork(both, ForkSession())).session
    await engine.sessions.reorder(fork, ReorderSession(rows=[1, 0, 1]))
    for token in range(10, 14):
        part = slice(token, token + 1)
        there = await step(both, x[:, part])
        np.testing.assert_allclose(await step(fork, x[[1, 0, 1], part]), there[[1, 0, 1]], rtol=1e-9, atol=1e-11)
    if name != "snap_kv":
        with pytest.raises(InvalidRequest, match="fork the session"):
            await engine.sessions.truncate(both, TruncateSession(length=13))
        assert engine.sessions.info(both).length == 14
