"""Effects of the edits of a sweep on a prediction: equal to those of separate runs."""

import numpy as np
import pytest
import torch
from tests.models.small_models import DECODERS, IDS, PAIRS, eager, loaded, near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.costs.answer_parts import at_once

TEXTS = [IDS, IDS[3:8]]
HEADS = {"tap": "context", "over": ["layers", "heads"], "set": 0}


def swept(model, copies=None, **fields):
    effects = EffectsOfSweep(model, validate(ModelEffectsRequest, {"tokens": IDS, **fields}))
    return at_once(effects.parts(copies or effects.copies))


def logs(model, edits, tokens=IDS, positions=None, **fields):
    """Ln p ``[positions, V]`` of a run with these edits."""
    body = {"tokens": tokens, "edits": edits, "return": ["logits"], "positions": positions, **fields}
    found = forward_reply(model, validate(ModelForwardRequest, body))
    return torch.from_numpy(np.asarray(found.logits)).double().log_softmax(-1)


def divergence(before, after):
    return (before.exp() * (before - after)).sum(-1)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", [*DECODERS, *PAIRS])
def test_each_head_of_each_layer_has_the_effect_of_a_run_without_it(family):
    model = loaded(family)
    assert model.head.predicts
    found = swept(model, sweep=HEADS)
    layers, heads = found.swept["layers"], found.swept["heads"]
    assert [str(layer) for layer in layers] == [*model.places]
    plain = logs(model, {})[-1]
    [token] = found.token
    near(found.baseline, plain[token])
    assert found.effects.value.shape == found.effects.divergence.shape == (len(layers), len(heads))
    for row, layer in enumerate(layers):
        for head in heads:
            if head >= model.places[str(layer)].widths.heads:
                assert np.isnan(found.effects.value[row, head])
                continue
            own = logs(model, {str(layer): [{"tap": "context", "heads": [head], "set": 0}]})[-1]
            near(found.effects.value[row, head], own[token] - plain[token])
            near(found.effects.divergence[row, head], divergence(plain, own))


def test_a_head_has_the_effect_that_plain_torch_finds():
    model, plain = loaded("gpt2"), eager("gpt2")
    found = swept(model, sweep=HEADS)
    width = plain.config.n_embd // plain.config.n_head
    ids = torch.tensor([IDS])

    def run(layer, head):
        """The model of transformers with the columns of one head set to zero before the projection."""
        part = slice(head * width, (head + 1) * width)

        def hook(_, args):
            state = args[0].clone()
            state[..., part] = 0
            return (state,)

        handle = plain.transformer.h[layer].attn.c_proj.register_forward_pre_hook(hook)
        with torch.no_grad():
            logits = plain(ids).logits[0, -1].double()
        handle.remove()
        return logits.log_softmax(-1)

    with torch.no_grad():
        before = plain(ids).logits[0, -1].double().log_softmax(-1)
    for layer in range(plain.config.n_layer):
        for head in range(plain.config.n_head):
            after = run(layer, head)
            near(found.effects.value[layer, head], after[found.token[0]] - before[found.token[0]])
            near(found.effects.divergence[layer, head], divergence(before, after))


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "t5"])
@pytest.mark.parametrize("copies", [1, 3, 64])
def test_padded_texts_and_common_edits_have_the_numbers_of_separate_runs(family, copies):
    model = loaded(family)
    keys = [*model.places]
    common = {keys[-1]: [{"tap": "weights", "heads": [1], "keys": [0], "scale": 0.5}],
              keys[0]: [{"tap": "context", "heads": [0], "scale": 2.0}]}  # fmt: skip
    sweep = {"tap": "weights", "over": ["heads", "keys"], "keys": [0, 2], "set": 0, "renormalize": True}
    layer = model.places[keys[-1]].key
    found = swept(model, copies, tokens=TEXTS, layers=[layer], edits=common, sweep=sweep, of={"token": 7})
    plain = logs(model, common, TEXTS)[:, -1, 7]
    near(found.baseline, plain)
    for head in found.swept["heads"]:
        for at, key in enumerate([0, 2]):
            edit = {"tap": "weights", "heads": [head], "keys": [key], "set": 0, "renormalize": True}
            own = logs(model, common | {keys[-1]: [*common[keys[-1]], edit]}, TEXTS)[:, -1, 7]
            near(found.effects.value[:, head, at], own - plain)


def test_windows_of_layers_and_groups_of_tokens():
    model = loaded("qwen3")
    count = len(model.places)
    sweep = {
        "tap": "masked_scores", "over": ["layers", "queries", "keys"], "set": -np.inf, "window": count - 1,
        "query_groups": [[8], [5, 6]], "key_groups": [[1, 2], [4], [0]],
    }  # fmt: skip
    found = swept(model, sweep=sweep, of={"position": 6, "token": 4, "against": 9, "logit": True})
    assert found.swept == {"layers": [0, 1], "queries": [[8], [5, 6]], "keys": [[1, 2], [4], [0]]}
    plain = logs(model, {}, positions=[6])[0]
    for row in range(2):
        for query, queries in enumerate(sweep["query_groups"]):
            for key, keys in enumerate(sweep["key_groups"]):
                edit = {"tap": "masked_scores", "queries": queries, "keys": keys, "set": -np.inf}
                own = logs(model, {str(row + at): [edit] for at in range(count - 1)}, positions=[6])[0]
                expected = (own[4] - own[9]) - (plain[4] - plain[9])
                near(found.effects.value[row, query, key], expected)
                near(found.effects.divergence[row, query, key], divergence(plain, own))


def test_each_edit_uses_its_own_part_of_a_value(rng):
    model = loaded("gpt2")
    heads, length = model.places["0"].widths.heads, len(IDS)
    value = rng.normal(size=(heads, length, 1)).astype(np.float32)
    sweep = {"tap": "context", "over": ["heads", "queries"], "queries": [7, 3], "value": value[:, [7, 3]]}
    found = swept(model, layers=[1], sweep=sweep, of={"token": 5})
    plain = logs(model, {})[-1]
    for head in range(heads):
        for at, query in enumerate([7, 3]):
            edit = {"tap": "context", "heads": [head], "queries": [query], "value": value[head, query : query + 1]}
            own = logs(model, {"1": [edit]})[-1]
            near(found.effects.value[head, at], own[5] - plain[5])


@pytest.mark.parametrize("tap", ["output", "v", "q", "scores"])
def test_every_tap_can_be_swept(tap):
    model = loaded("llama")
    over = {"output": ["layers", "queries"], "scores": ["heads", "keys"]}.get(tap, ["layers", "heads"])
    found = swept(model, layers=[1, 0], sweep={"tap": tap, "over": over, "scale": 0.25}, of={"token": 5})
    plain = logs(model, {})[-1]
    for place in np.ndindex(found.effects.value.shape):
        chosen = {axis: found.swept[axis][at] for axis, at in zip(over, place, strict=True)}
        layers = [chosen.pop("layers")] if "layers" in chosen else [0, 1]
        edit = {"tap": tap, "scale": 0.25} | {axis: [at] for axis, at in chosen.items()}
        own = logs(model, {str(layer): [edit] for layer in layers})[-1]
        near(found.effects.value[place], own[5] - plain[5])


@pytest.mark.parametrize("mean", ["sum", "mean"])
def test_the_effect_on_a_given_answer(mean):
    model = loaded("gpt2")
    found = swept(model, tokens=None, text="the cat sat", answer=" on the mat", sweep=HEADS, of={"answer": mean})
    total = np.sum if mean == "sum" else np.mean
    body = {"text": "the cat sat", "answer": " on the mat"}

    def run(edits):
        reply = forward_reply(model, validate(ModelForwardRequest, body | {"edits": edits}))
        return total([each.logprob for each in reply.answer])

    plain = run({})
    near(found.baseline, plain)
    for layer in (0, 1):
        own = run({str(layer): [{"tap": "context", "heads": [1], "set": 0}]})
        near(found.effects.value[layer, 1], own - plain, 1e-4)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", DECODERS)
def test_the_layers_below_an_edit_run_once(family):
    model = loaded(family)
    count = model.shared_layers.count
    assert count >= len(model.places)
    assert all(map(model.begins_at, range(count)))
    calls = []
    first = next(iter(model.places.values()))
    handle = first.module.register_forward_hook(lambda *_: calls.append(first))
    swept(model, sweep=HEADS)
    handle.remove()
    assert len(calls) == 2  # without a swept edit, and with those of the first layer
    assert not any("forward" in vars(module) for module in model.model.modules())


def test_a_model_whose_layers_pass_on_more_than_a_state_runs_whole():
    model = loaded("t5")
    assert model.shared_layers.count == 0
    assert not model.begins_at(1)


def test_the_layers_of_a_trial_that_fails_are_not_shared(monkeypatch):
    model = loaded("llama")
    whole = swept(model, sweep=HEADS)
    monkeypatch.setattr(model.shared_layers, "_able", dict.fromkeys(range(9), False))
    near(swept(model, sweep=HEADS).effects.value, whole.effects.value)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"sweep": HEADS | {"over": ["layers", "keys"]}}, "sweep.over.1", "context has no keys"),
        ({"sweep": HEADS | {"heads": [99]}}, "sweep.heads", "out of range"),
        ({"sweep": HEADS | {"window": 99}}, "sweep.window", "it takes 99"),
        ({"sweep": HEADS | {"over": ["heads"], "window": 2}}, "sweep", "add layers to over"),
        ({"sweep": HEADS | {"over": ["queries"], "query_groups": [[1], [99]]}}, "sweep.query_groups.1", "out of range"),
        ({"sweep": HEADS | {"query_groups": [[1]]}}, "sweep", "add queries to over"),
        ({"sweep": {"tap": "weights", "over": ["layers", "heads", "queries", "keys"], "set": 0,
                    "key_groups": [[0]] * 4096}}, "sweep", "at most 65536"),
        ({"sweep": HEADS, "of": {"token": "no such word"}}, "of.token", "token"),
        ({"sweep": HEADS, "layers": [77]}, "layers.0", "no attention"),
        ({"sweep": {"tap": "context", "value": [1.0, 2.0, 3.0, 4.0, 5.0]}}, "sweep.value", "broadcasts"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_made_is_refused_by_its_field(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as fault:
        EffectsOfSweep(loaded("gpt2"), validate(ModelEffectsRequest, {"tokens": IDS, **fields}))
    assert str(fault.value.param).startswith(param)


def test_scales_of_what_is_added_have_the_effects_of_runs_of_their_own():
    model = loaded("llama")
    x = np.random.default_rng(0).normal(size=(len(IDS), model.places["0"].output_width)).astype(np.float32)
    sweep = {
        "tap": "output",
        "over": ["scales", "layers"],
        "scales": [-1, 0, 0.5, 8],
        "add": x,
        "queries": [*range(len(IDS))],
    }
    found = swept(model, sweep=sweep)
    assert found.swept == {"scales": [-1.0, 0.0, 0.5, 8.0], "layers": found.swept["layers"]}
    plain = logs(model, {})[-1]
    for row, scale in enumerate(found.swept["scales"]):
        for column, layer in enumerate(found.swept["layers"]):
            own = logs(model, {str(layer): [{"tap": "output", "add": x * np.float32(scale)}]})[-1]
            near(found.effects.value[row, column], own[found.token[0]] - plain[found.token[0]], 2e-5)
    near(found.effects.value[1], 0)
    assert abs(found.effects.value[3]).min() > 1e-2


def test_an_edit_that_adds_by_query_uses_its_own_part():
    model = loaded("gpt2")
    x = np.random.default_rng(1).normal(size=(len(IDS), model.places["0"].output_width)).astype(np.float32)
    found = swept(model, sweep={"tap": "output", "over": ["queries"], "add": x}, layers=[0])
    plain = logs(model, {})[-1]
    for query in (0, 4, 8):
        own = logs(model, {"0": [{"tap": "output", "queries": [query], "add": x[query]}]})[-1]
        near(found.effects.value[query], own[found.token[0]] - plain[found.token[0]], 2e-5)


@pytest.mark.parametrize(
    ("sweep", "param"),
    [
        ({"tap": "output", "over": ["scales"], "add": 1.0}, "sweep.scales"),
        ({"tap": "output", "over": ["layers"], "add": 1.0, "scales": [1]}, "sweep.scales"),
        ({"tap": "output", "over": ["scales"], "scale": 1.0, "scales": [1]}, "sweep.scales"),
        ({"tap": "output", "over": ["scales"], "add": 1e38, "scales": [1, 10]}, "sweep.add"),
    ],
)
def test_scales_that_multiply_nothing_or_too_much_are_refused_by_name(sweep, param):
    with pytest.raises(InvalidRequest) as caught:
        swept(loaded("gpt2"), sweep=sweep)
    assert caught.value.param == param
