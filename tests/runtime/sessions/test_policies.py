"""Policies against the papers' definitions, written token by token."""

import numpy as np
import pytest
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.sessions import HeavyHitters, SnapKV, WindowSinks
from attention_contract.spec import AttentionSpec
from attention_contract.validation import validate
from attention_service.core.kv_cache.policies import keeper_of

CAUSAL = AttentionSpec(masks=[{"name": "causal"}])
BATCH, HEADS, GROUPS = 2, 4, 2


def weights_of(rng: np.random.Generator, queries: int, keys: int) -> torch.Tensor:
    """Weights ``[B, H, queries, keys]``, of which each row sums to 1."""
    return torch.from_numpy(rng.dirichlet(np.ones(keys), (BATCH, HEADS, queries)))


def test_a_window_keeps_the_first_tokens_and_the_last():
    keeper = keeper_of(WindowSinks(window=3, sinks=2), CAUSAL, GROUPS, HEADS)
    held = list(range(4))
    assert keeper.after_step(None, 0, 4) is None
    for token in range(4, 12):
        assert keeper.wants(1, len(held)) is None
        held.append(token)
        kept = keeper.after_step(None, len(held) - 1, 1)
        held = held if kept is None else [held[i] for i in kept[0, 0]]
        assert held == (list(range(token + 1)) if token < 5 else [0, 1, token - 2, token - 1, token])


def test_heavy_hitters_are_those_of_the_paper(rng):
    heavy, window = 3, 2
    keeper = keeper_of(HeavyHitters(heavy=heavy, window=window), CAUSAL, GROUPS, HEADS)
    held = [[[] for _ in range(GROUPS)] for _ in range(BATCH)]
    votes = [[{} for _ in range(GROUPS)] for _ in range(BATCH)]
    token, kept_keys = 0, 0
    for new in (4, 1, 1, 3, 1, 1):
        assert keeper.wants(new, kept_keys) == slice(0, new)
        weights = weights_of(rng, new, kept_keys + new)
        kept = keeper.after_step(weights, kept_keys, new)
        for b in range(BATCH):
            for g in range(GROUPS):
                names = held[b][g] + list(range(token, token + new))
                for place, name in enumerate(names):
                    heads = range(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)
                    got = sum(float(weights[b, h, q, place]) for h in heads for q in range(new))
                    votes[b][g][name] = votes[b][g].get(name, 0.0) + got
                if len(names) > heavy + window:
                    older = sorted(sorted(names[:-window], key=lambda name: -votes[b][g][name])[:heavy])
                    want = older + names[-window:]
                    assert [names[i] for i in kept[b, g]] == want
                    names = want
                else:
                    assert kept is None
                held[b][g] = names
        token, kept_keys = token + new, len(held[0][0])


def test_snap_kv_chooses_by_the_pooled_votes_of_the_last_queries(rng):
    keep, window, size, new = 3, 4, 3, 12
    keeper = keeper_of(SnapKV(keep=keep, window=window, kernel=size), CAUSAL, GROUPS, HEADS)
    assert keeper.wants(new, 0) == slice(new - window, new)
    weights = weights_of(rng, window, new)
    kept = keeper.after_step(weights, 0, new)
    for b in range(BATCH):
        for g in range(GROUPS):
            heads = range(g * HEADS // GROUPS, (g + 1) * HEADS // GROUPS)
            votes = [sum(float(weights[b, h, q, j]) for h in heads for q in range(window)) for j in range(new - window)]
            pooled = [max(votes[max(j - size // 2, 0) : j + size // 2 + 1]) for j in range(len(votes))]
            chosen = kept[b, g][:keep].tolist()
            assert sorted(chosen) == chosen
            assert sorted(pooled[j] for j in chosen) == pytest.approx(sorted(pooled)[-keep:])
            assert kept[b, g][keep:].tolist() == list(range(new - window, new))
    assert keeper.wants(1, keep + window) is None
    assert keeper.after_step(None, keep + window, 1) is None
    keeper.truncate(1, keep + window + 1, new + 1)  # a later token
    with pytest.raises(InvalidRequest, match="first step"):
        keeper.truncate(1, keep + window, new)


@pytest.mark.parametrize(
    "policy", [WindowSinks(window=2), HeavyHitters(heavy=1, window=1), SnapKV(keep=1)], ids=lambda p: p.name
)
@pytest.mark.parametrize(
    "spec",
    [
        {"masks": [{"name": "sliding_window", "left": 3}]},
        {"position": {"name": "alibi"}},
        {"position": {"name": "relative_bias"}},
        {"method": {"name": "linear"}},
        {"add_zero_attn": True},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_a_spec_that_counts_distances_is_refused(policy, spec):
    with pytest.raises(InvalidRequest, match="policy full") as refusal:
        keeper_of(policy, validate(AttentionSpec, spec), GROUPS, HEADS)
    assert refusal.value.param == "policy"


def test_what_a_policy_cannot_take_back_is_refused(rng):
    window, heavy = (
        keeper_of(policy, CAUSAL, GROUPS, HEADS) for policy in (WindowSinks(window=2), HeavyHitters(heavy=2, window=2))
    )
    window.truncate(1, 5, 5)
    for keeper in (window, heavy):
        keeper.truncate(0, 5, 9)
        with pytest.raises(InvalidRequest, match="fork"):
            keeper.truncate(1, 5, 9)


def test_forks_vote_apart_and_votes_follow_their_rows(rng):
    keeper = keeper_of(HeavyHitters(heavy=1, window=1), CAUSAL, GROUPS, HEADS)
    keeper.after_step(weights_of(rng, 2, 2), 0, 2)
    votes, fork = keeper.votes.clone(), keeper.copy()
    fork.after_step(weights_of(rng, 1, 3), 2, 1)
    assert torch.equal(keeper.votes, votes)
    keeper.reorder([1, 1, 0])
    assert torch.equal(keeper.votes, votes[[1, 1, 0]])
