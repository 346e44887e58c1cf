"""The attention that the plugin tells of, beside loops in float64, of passes as both of vLLM's runners make them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.plugins.fake_vllm import HEADS, FakeEngine, attended, facts_of

from attention_vllm import last_queries
from attention_vllm.attention_outputs import AttentionOutputs
from attention_vllm.kernel_trial import KernelTrial
from attention_vllm.last_queries import LastQueries
from attention_vllm.layer_facts import refused_layer
from attention_vllm.page_layouts import SideBySide, TokensLast

LOOK = {"weights": True, "top_k": 2, "statistics": ["entropy", "first_key", "max_weight", "received"]}
FACTS = {
    "plain": facts_of(),
    "window": facts_of(window=5),
    "capped": facts_of(cap=3.0, scale=0.7),
    "sinks": facts_of(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0])),
}


def exact(engine, name, layer, position):
    """The weights ``[H, K]`` of the query that chooses the token at a position."""
    text, facts = engine.texts[name], engine.facts[layer]
    q = engine.queries(name, layer, position - 1, position)
    return attended(facts, q, text.k[layer][:, :position], text.v[layer][:, :position], position - 1)[0][:, 0].numpy()


def hold(engine, name, results, positions, layers=(0, 1)):
    assert [each.get("position") for each in results] == positions, results
    for each in results:
        assert [fields["layer"] for fields in each["layers"]] == list(layers)
        for fields in each["layers"]:
            weights = exact(engine, name, fields["layer"], each["position"])
            np.testing.assert_allclose(fields["weights"], weights, atol=1e-5)
            shares = weights / weights.sum(-1, keepdims=True)
            logs = np.log(np.where(shares > 0, shares, 1))
            statistics = fields["statistics"]
            np.testing.assert_allclose(statistics["entropy"], -(shares * logs).sum(-1), atol=1e-4)
            np.testing.assert_allclose(statistics["first_key"], shares[:, 0], atol=1e-5)
            np.testing.assert_allclose(statistics["max_weight"], weights.max(-1), atol=1e-5)
            np.testing.assert_allclose(statistics["received"], weights, atol=1e-5)
            top = np.sort(weights, -1)[:, ::-1][:, :2]
            np.testing.assert_allclose(fields["top_keys"]["weights"], top, atol=1e-5)


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize(("version", "layout"), [(1, TokensLast()), (2, SideBySide())], ids=["V1", "V2"])
def test_rows_that_ask_are_told_of_in_passes_of_chunks_and_single_tokens(kind, version, layout):
    engine = FakeEngine(FACTS[kind], layout, version=version)
    engine.add("a", [*range(11)], LOOK)
    engine.add("silent", [*range(7)])
    engine.add("b", [*range(3)], LOOK | {"statistics": LOOK["statistics"]})
    first = {"a": (0, 6), "silent": (0, 7), "b": (0, 3)}
    for name in first:
        engine.grow(engine.texts[name])
    results = engine.run(first)
    assert results["a"] == results["silent"] == []  # the middle of a prompt chooses no token
    hold(engine, "b", results["b"], [3])
    engine.texts["b"].tokens.append(5)
    results = engine.run({"a": (6, 11), "b": (3, 4)})
    hold(engine, "a", results["a"], [11])
    hold(engine, "b", results["b"], [4])
    assert all(torch.equal(engine.outputs[layer], engine.plain[layer]) for layer in (0, 1))
    # b is preempted and computed again: what was told of is not told twice
    engine.texts["b"].tokens.append(6)
    results = engine.run({"b": (0, 4)})
    assert results["b"] == []
    hold(engine, "b", engine.run({"b": (4, 5)})["b"], [5])


@pytest.mark.parametrize("kind", FACTS)
def test_pairs_are_told_with_the_token_that_their_query_chooses(kind):
    pairs, candidates = [[8, 2], [8, 8], [9, 4], [9, 2]], [2, 4, 7]
    asks = {"all": {"pairs": pairs}, "among": {"pairs": pairs, "candidates": candidates}}
    engine = FakeEngine(FACTS[kind])
    for name, options in asks.items():
        engine.add(name, [*range(9)], {"statistics": ["pairs"], "statistic_options": options})
        engine.grow(engine.texts[name])
    told = engine.run(dict.fromkeys(asks, (0, 9)))
    for first, query in enumerate((8, 9, 10), 9):
        for name, options in asks.items():
            (result,) = told[name]
            keys = [key for own, key in pairs if own == query]
            for fields in result["layers"]:
                found, weights = fields["statistics"]["pairs"], exact(engine, name, fields["layer"], query + 1)
                if not keys:
                    assert np.isnan([found["share"], found["first"]]).all()
                    continue
                among = options.get("candidates", range(query + 1))
                best = np.array(among)[weights[:, list(among)].argmax(-1)]
                np.testing.assert_allclose(found["share"], weights[:, keys].mean(-1), atol=1e-5)
                firsts = [(best == key) & (weights[:, key] != 0) for key in keys]
                np.testing.assert_allclose(found["first"], np.mean(firsts, 0), atol=1e-6)
        for name in asks:
            engine.texts[name].tokens.append(5)
        told = engine.run(dict.fromkeys(asks, (first, first + 1)))


@pytest.mark.parametrize("most", [1, 500, 2**21])
@pytest.mark.parametrize("kind", FACTS)
def test_layers_are_computed_at_once_or_apart_as_their_keys_take_memory(kind, most, monkeypatch):
    monkeypatch.setattr(last_queries, "_MOST_NUMBERS", most)
    counts = []
    computed = LastQueries.weights
    monkeypatch.setattr(LastQueries, "weights", lambda own: (counts.append(len(own.layers)), computed(own))[1])
    engine = FakeEngine(dict.fromkeys(range(5), FACTS[kind]))
    engine.add("a", [*range(9)], LOOK)
    engine.add("b", [*range(6)], LOOK | {"layers": [4, 1, 2]})
    engine.grow(engine.texts["a"])
    engine.grow(engine.texts["b"])
    results = engine.run({"a": (0, 9), "b": (0, 6)})
    hold(engine, "a", results["a"], [9], range(5))
    hold(engine, "b", results["b"], [6], [4, 1, 2])
    apart = [1] * 5  # as layers with sinks of their own are
    assert sorted(counts) == (apart if kind == "sinks" else {1: apart, 500: [1, 1, 1, 2], 2**21: [2, 3]}[most])


def test_heads_and_layers_are_told_of_in_the_order_asked():
    engine = FakeEngine(facts_of())
    engine.add("a", [1, 2, 3, 4], {"layers": [1, 0], "heads": [3, 1], "weights": True, "statistics": []})
    engine.grow(engine.texts["a"])
    ((result),) = engine.run({"a": (0, 4)})["a"]
    assert [fields["layer"] for fields in result["layers"]] == [1, 0]
    for fields in result["layers"]:
        assert fields.keys() == {"layer", "weights"}
        np.testing.assert_allclose(fields["weights"], exact(engine, "a", fields["layer"], 4)[[3, 1]], atol=1e-5)


def test_statistics_of_tokens_read_the_tokens_of_the_text():
    ask = {
        "statistics": ["duplicate_token", "classes"], "weights": True,
        "statistic_options": {"token_classes": {"fives": [5]}, "spans": [{"name": "begin", "tokens": [0, 2]}]},
    }  # fmt: skip
    engine = FakeEngine(facts_of())
    engine.add("a", [5, 9, 5, 7, 5], ask)
    engine.grow(engine.texts["a"])
    (result,) = engine.run({"a": (0, 5)})["a"]
    for fields in result["layers"]:
        weights = exact(engine, "a", fields["layer"], 5)
        statistics = fields["statistics"]
        np.testing.assert_allclose(statistics["duplicate_token"], weights[:, [0, 2]].sum(-1), atol=1e-5)
        np.testing.assert_allclose(statistics["classes"]["fives"], weights[:, [0, 2, 4]].sum(-1), atol=1e-5)
        np.testing.assert_allclose(statistics["classes"]["begin"], weights[:, :2].sum(-1), atol=1e-5)
    for version, tokens in ((2, [5, 9, 5, 7, 5]), (1, [5, 9, 5, 7, -1])):
        engine = FakeEngine(facts_of(), SideBySide(), version=version)
        engine.add("a", tokens, ask, prompt=4)
        engine.grow(engine.texts["a"])
        (result,) = engine.run({"a": (0, 5)})["a"]
        assert result["refused"]["param"] == "attention.statistics"


def edit_by_loops(tap, edit, engine, layer, stop):
    """The context ``[H, Q, D]`` of a whole text under one edit, by its definition."""
    text, facts = engine.texts["a"], engine.facts[layer]
    q, k, v = engine.queries("a", layer, 0, stop).double(), text.k[layer][:, :stop].double(), text.v[layer][:, :stop]
    v = v.double().clone()
    if tap == "v":
        v[edit["heads"]] *= edit["scale"]
    groups = [facts.key_head(head) for head in range(HEADS)]
    scores = q @ k[groups].transpose(1, 2) * facts.scale
    if tap == "scores":
        scores[edit["heads"][0], :, edit["keys"]] += edit["add"]
    weights = scores.masked_fill(~torch.ones(stop, stop).tril().bool(), -torch.inf).softmax(-1)
    if tap == "weights":
        weights[edit["heads"][0], :, edit["keys"]] = 0
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    context = weights @ v[groups]
    if tap == "context":
        context[edit["heads"]] = edit["set"]
    return weights, context


@pytest.mark.parametrize(
    ("tap", "edit", "heads"),
    [
        ("context", {"heads": [2], "set": 0}, [2]),
        ("weights", {"heads": [1], "keys": [0, 2], "set": 0, "renormalize": True}, [1]),
        ("scores", {"heads": [3], "keys": [1], "add": 2.5}, [3]),
        ("v", {"heads": [1], "scale": -1.5}, [2, 3]),
    ],
)
def test_an_edit_changes_its_heads_in_its_rows_and_nothing_else(tap, edit, heads):
    engine = FakeEngine(facts_of())
    ask = LOOK | {"statistics": [], "edits": {"1": [{"tap": tap, **edit}]}}
    engine.add("a", [*range(6)], ask, cache_salt="own")
    engine.add("b", [*range(5)], LOOK)
    for text in engine.texts.values():
        engine.grow(text)
    results = engine.run({"a": (0, 6), "b": (0, 5)})
    weights, context = edit_by_loops(tap, edit, engine, 1, 6)
    start, stop = engine.starts["a"]
    changed = engine.outputs[1][start:stop].transpose(0, 1)
    np.testing.assert_allclose(changed[heads], context[heads], atol=1e-5)
    others = [head for head in range(HEADS) if head not in heads]
    assert torch.equal(changed[others], engine.plain[1][start:stop].transpose(0, 1)[others])
    start, stop = engine.starts["b"]
    assert torch.equal(engine.outputs[1][start:stop], engine.plain[1][start:stop])
    assert torch.equal(engine.outputs[0], engine.plain[0])
    (result,) = results["a"]
    np.testing.assert_allclose(result["layers"][1]["weights"], weights[:, -1], atol=1e-5)
    hold(engine, "b", results["b"], [5])


def test_edits_of_some_queries_or_of_the_answer_leave_the_other_tokens_bits():
    engine = FakeEngine(facts_of())
    ask = {"statistics": [], "from": "answer", "edits": {"0": [{"tap": "context", "set": 1}]}}
    engine.add(
        "a",
        [*range(6)],
        ask,
        cache_salt="own",
    )
    engine.add(
        "b",
        [*range(6)],
        {"statistics": [], "edits": {"0": [{"tap": "context", "queries": [7], "set": 2}]}},
        cache_salt="b",
    )
    for text in engine.texts.values():
        engine.grow(text)
    engine.run({"a": (0, 6), "b": (0, 6)})
    assert torch.equal(engine.outputs[0], engine.plain[0])
    for text in engine.texts.values():
        text.tokens += [4, 4]
    engine.run({"a": (6, 7), "b": (6, 7)})
    a, b = (slice(*engine.starts[name]) for name in "ab")
    assert (engine.outputs[0][a] == 1).all()
    assert torch.equal(engine.outputs[0][b], engine.plain[0][b])
    engine.run({"a": (7, 8), "b": (7, 8)})
    assert (engine.outputs[0][slice(*engine.starts["b"])] == 2).all()


def test_an_output_that_departs_from_the_weights_refuses_the_ask_and_stays():
    engine = FakeEngine(facts_of())
    engine.spoiled = 0.5
    engine.add("a", [*range(5)], {"edits": {"0": [{"tap": "context", "set": 0}]}}, cache_salt="own")
    engine.grow(engine.texts["a"])
    (result,) = engine.run({"a": (0, 5)})["a"]
    assert "depart from the kernel's output" in result["refused"]["detail"]
    assert torch.equal(engine.outputs[0], engine.plain[0])
    assert engine.run({"a": (4, 5)})["a"] == []


def test_layers_that_another_backend_computes_are_never_left_out_in_silence():
    engine = FakeEngine(facts_of())
    engine.skipped = {1}
    engine.add("a", [*range(5)], {"statistics": ["entropy"]})
    engine.grow(engine.texts["a"])
    (result,) = engine.run({"a": (0, 5)})["a"]
    assert "layers [1]" in result["refused"]["detail"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_refusal_of_one_ask_leaves_those_beside_it(version):
    engine = FakeEngine(facts_of(), SideBySide() if version == 2 else TokensLast(), version=version)
    engine.skipped = {1}
    engine.add("a", [*range(5)], {"statistics": ["duplicate_token"]})  # V2 does not know its tokens either
    engine.add("b", [*range(4)], LOOK | {"layers": [0]})
    for text in engine.texts.values():
        engine.grow(text)
    results = engine.run({"a": (0, 5), "b": (0, 4)})
    (result,) = results["a"]
    assert "layers [1]" in result["refused"]["detail"]
    hold(engine, "b", results["b"], [4], [0])


def test_a_fault_in_the_plugin_ends_the_ask_alone():
    class Broken(TokensLast):
        def key_pages(self, cache, tokens):
            raise RuntimeError("no such pages")

    engine = FakeEngine(facts_of())
    engine.add("a", [*range(5)], LOOK)
    engine.grow(engine.texts["a"])
    engine.layout = Broken()
    (result,) = engine.run({"a": (0, 5)})["a"]
    assert "no such pages" in result["refused"]["detail"]
    assert torch.equal(engine.outputs[0], engine.plain[0])


def test_every_ask_is_refused_with_the_reason_of_a_failed_self_test():
    engine = FakeEngine(facts_of())
    engine.observer.refusal = "layer 3: weights times values depart"
    engine.add("a", [*range(5)], LOOK)
    engine.grow(engine.texts["a"])
    (result,) = engine.run({"a": (0, 5)})["a"]
    assert result["refused"]["param"] == "attention"
    assert "layer 3" in result["refused"]["detail"]


@pytest.mark.parametrize(("spoiled", "skipped"), [(0.0, set()), (0.1, set()), (0.0, {1})])
def test_a_trial_compares_every_query_of_every_layer(spoiled, skipped):
    engine = FakeEngine(facts_of(window=3))
    engine.spoiled, engine.skipped = spoiled, skipped
    engine.observer.trial = trial = KernelTrial(frozenset({"x", "y"}))
    for name, length in (("x", 9), ("y", 4), ("other", 5)):
        engine.add(name, [*range(length)])
        engine.grow(engine.texts[name])
    engine.run({"x": (0, 9), "y": (0, 4), "other": (0, 5)})
    verdict = trial.verdict(frozenset({0, 1}), 13)
    if not spoiled and not skipped:
        assert verdict is None
        assert trial.verdict(frozenset({0, 1}), 14) is not None
    else:
        assert ("depart" if spoiled else "layers [1]") in verdict


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"isa": "amx"}, "packed for the kernel 'amx'"),
    ],
)
def test_a_layer_that_is_not_read_says_why(fields, reason):
    given = {"attn_type": "decoder", "alibi_slopes": None, "kv_cache_dtype": "auto", "isa": "vec"} | fields
    layer = SimpleNamespace(isa=given.pop("isa"))
    refusal = refused_layer(SimpleNamespace(**given), layer)
    assert refusal is None if reason is None else reason in refusal


def projected(engine, layer):
    """The output of a layer without edits of it."""
    return engine.modules[layer].o_proj(engine.outputs[layer].flatten(1))


OUTPUT_EDITS = {
    "set": ({"set": 1.5}, lambda x: torch.full_like(x, 1.5)),
    "add": ({"add": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}, lambda x: x + torch.arange(1.0, 7.0)),
    "add a number": ({"add": 0.25}, lambda x: x + 0.25),
    "scale of some": ({"queries": [1, 4], "scale": 2.0}, lambda x: x * torch.tensor([1.0, 2, 1, 1, 2, 1])[:, None]),
    "value by query": (
        {"queries": [0, 2], "value": [[1.0], [2.0]]},
        lambda x: torch.cat([torch.full_like(x[:1], 1), x[1:2], torch.full_like(x[:1], 2), x[3:]]),
    ),
}


@pytest.mark.parametrize("kind", OUTPUT_EDITS)
def test_an_output_is_edited_in_the_rows_of_its_request_alone(kind):
    edit, expected = OUTPUT_EDITS[kind]
    engine = FakeEngine(facts_of())
    engine.add("a", [*range(6)], LOOK | {"edits": {"1": [{"tap": "output"} | edit]}}, cache_salt="own")
    engine.add("b", [*range(5)], LOOK)
    for text in engine.texts.values():
        engine.grow(text)
    results = engine.run({"a": (0, 6), "b": (0, 5)})
    plain = projected(engine, 1)
    a, b = (slice(*engine.starts[name]) for name in "ab")
    torch.testing.assert_close(engine.projected[1][a], expected(plain[a]), atol=1e-6, rtol=0)
    assert torch.equal(engine.projected[1][b], plain[b])
    assert torch.equal(engine.projected[0], projected(engine, 0))
    hold(engine, "a", results["a"], [6])
    assert not engine.modules[1]._forward_hooks


def test_an_output_is_edited_from_the_answer_on():
    engine = FakeEngine(facts_of())
    ask = {"statistics": [], "from": "answer", "edits": {"0": [{"tap": "output", "set": 7}]}}
    engine.add("a", [*range(4)], ask, cache_salt="own")
    engine.grow(engine.texts["a"])
    engine.run({"a": (0, 4)})
    assert torch.equal(engine.projected[0], projected(engine, 0))
    engine.texts["a"].tokens.append(4)
    engine.run({"a": (4, 5)})
    assert (engine.projected[0] == 7).all()


def test_an_output_that_is_not_seen_refuses_the_ask():
    engine = FakeEngine(facts_of())
    engine.observer.outputs = AttentionOutputs({})
    engine.add("a", [*range(4)], {"edits": {"0": [{"tap": "output", "set": 7}]}}, cache_salt="own")
    engine.grow(engine.texts["a"])
    (result,) = engine.run({"a": (0, 4)})["a"]
    assert "outputs of layers [0]" in result["refused"]["detail"]


def test_a_trial_finds_outputs_that_are_those_of_the_last_projection():
    engine = FakeEngine(facts_of())
    with engine.observer.outputs.trial([0, 1]) as trial:
        engine.add("a", [*range(4)])
        engine.grow(engine.texts["a"])
        engine.run({"a": (0, 4)})
    assert trial.verdict() == {0: 6, 1: 6}
    engine.modules[1].forward = lambda context: 2 * engine.modules[1].o_proj(context)
    with engine.observer.outputs.trial([0, 1]) as trial:
        engine.run({"a": (0, 4)})
    assert "layer 1" in trial.verdict()
    engine.modules[1].forward = type(engine.modules[1]).forward.__get__(engine.modules[1])
    engine.modules[1].o_proj.reduce_results = False
    with engine.observer.outputs.trial([0, 1]) as trial:
        engine.run({"a": (0, 4)})
    assert "layer 1" in trial.verdict()
    with engine.observer.outputs.trial([0, 2]) as trial:
        engine.run({"a": (0, 4)})
    assert "[2]" in trial.verdict()
