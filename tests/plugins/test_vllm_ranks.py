"""Tensor parallelism: the results of ranks, merged, beside those of one worker with all heads."""

import numpy as np
import pytest
import torch
from tests.plugins.fake_vllm import HEADS, KV_HEADS, FakeEngine, facts_of

from attention_vllm.door.result_inbox import AwaitedResults
from attention_vllm.rank_heads import RankHeads

ASKS = {
    "all heads": {"weights": True, "top_k": 2, "statistics": ["entropy", "received"]},
    "some heads": {"heads": [3, 0, 2], "weights": True, "statistics": ["entropy"]},
    "heads of one rank": {"heads": [1], "weights": True, "top_k": 1, "statistics": ["first_key"]},
    "spans": {
        "statistics": ["classes"], "statistic_options": {"spans": [{"name": "begin", "tokens": [0, 2]}]},
    },
}  # fmt: skip
EDITS = {
    "context": [{"tap": "context", "heads": [2, 0], "value": [[[1.0]], [[2.0]]]}],
    "v": [{"tap": "v", "heads": [1], "scale": 0.5}],
    "scores": [{"tap": "scores", "heads": [1, 3], "keys": [0], "add": 2.0}],
    "two": [{"tap": "k", "add": 0.5}, {"tap": "weights", "heads": [2], "keys": [1], "set": 0, "renormalize": True}],
}
KIND = {"plain": facts_of(), "sinks": facts_of(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))}


def run(ranks, ask, kind, edits=()):
    """The merged results of two passes of one text, and the context of layer 1 with the heads of all ranks."""
    awaited, contexts = AwaitedResults("a"), []
    for rank in range(ranks):
        engine = FakeEngine(KIND[kind], share=RankHeads.of(rank, ranks, KV_HEADS))
        engine.add("a", [*range(6)], ask | ({"edits": {"1": list(edits)}} if edits else {}), cache_salt="own")
        engine.grow(engine.texts["a"])
        messages = engine.run({"a": (0, 6)})["a"]
        contexts.append(engine.outputs[1])
        engine.texts["a"].tokens.append(3)
        for message in messages + engine.run({"a": (6, 7)})["a"]:
            assert "refused" not in message, message
            awaited.add(message)
    assert not awaited.parts
    return awaited.layers, torch.cat(contexts, 1)


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, own in first.items():
        if isinstance(own, dict):
            assert_equal(own, second[name])
        else:
            np.testing.assert_allclose(own, second[name], atol=1e-6)


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ask", ASKS)
def test_the_results_of_ranks_are_those_of_one_worker(ask, ranks, kind):
    one, _ = run(1, ASKS[ask], kind)
    several, _ = run(ranks, ASKS[ask], kind)
    assert [*one] == [*several] == [6, 7]
    for position, layers in one.items():
        for first, second in zip(layers, several[position], strict=True):
            assert_equal(first, second)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("edits", EDITS)
def test_edits_name_the_heads_of_the_model_and_change_those_of_their_rank(edits, ranks):
    one, context = run(1, ASKS["all heads"], "plain", EDITS[edits])
    several, contexts = run(ranks, ASKS["all heads"], "plain", EDITS[edits])
    torch.testing.assert_close(contexts, context, atol=1e-5, rtol=0)
    _, plain = run(1, ASKS["all heads"], "plain")
    assert not torch.allclose(context, plain)
    for position, layers in one.items():
        for first, second in zip(layers, several[position], strict=True):
            assert_equal(first, second)


def test_ranks_have_the_heads_of_the_model_once_and_share_key_heads():
    for ranks, copies in ((1, 1), (2, 1), (4, 2)):
        shares = [RankHeads.of(rank, ranks, KV_HEADS) for rank in range(ranks)]
        assert {share.copies for share in shares} == {copies}
        own = facts_of().__class__(HEADS // ranks, KV_HEADS * copies // ranks, 8, 1.0)
        places = [place for share in shares for place in share.own_heads(None, own).places or range(HEADS)]
        assert places == [*range(HEADS)]
        whole = shares[0].whole(own)
        assert (whole.heads, whole.kv_heads) == (HEADS, KV_HEADS)


def test_a_token_is_told_of_when_all_ranks_have_told_of_it():
    awaited = AwaitedResults("a")
    layer = {"layer": 0, "places": [0], "weights": np.ones((1, 3))}
    awaited.add({"id": "a", "position": 3, "layers": [layer], "rank": 0, "ranks": 2})
    assert not awaited.layers
    awaited.add({"id": "a", "position": 3, "layers": [layer | {"places": [1]}], "rank": 1, "ranks": 2})
    assert awaited.layers[3][0]["weights"].shape == (2, 3)
