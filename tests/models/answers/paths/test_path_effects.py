"""Effects of paths between components: equal to those of runs in which all other components are frozen."""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.models.answers.paths.frozen_runs import FAMILIES, FrozenRuns
from tests.models.small_models import IDS, device, loaded, near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.validation import validate
from attention_service.models.answers.paths.path_effects import EffectsOfPaths
from attention_service.models.answers.paths.path_models import check_stack
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.stream_search import find_stream

OTHER = [5, 9, 4, 8, 12, 4, 30, 10, 3]
EVERY = {"parts": ["heads", "mlps", "embeddings"], "heads": [0, 3]}
ALL = {"parts": ["q", "k", "v", "mlps", "logits"], "heads": [1]}


@cache
def served(family, layers=3, dtype=None):
    """A model of three layers, loaded, with its residual stream, and the same by itself."""
    plain = original(family, layers)
    model = LoadedModel(family, tiny(family, **_deeper(family, layers)).requires_grad_(False), tokenizer(), device())
    return model, find_stream(model), FrozenRuns(plain, family)


def original(family, layers=3):
    return tiny(family, **_deeper(family, layers))


def _deeper(family, layers):
    found = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    if family == "gemma2":
        found["layer_types"] = ["sliding_attention", "full_attention"] * 2
        found["layer_types"] = found["layer_types"][:layers]
    if family == "granite":
        found |= {"residual_multiplier": 0.4, "embedding_multiplier": 3.0}
    return found


def paths(family, copies=None, tokens=IDS, **fields):
    model, stream, _ = served(family)
    request = validate(ModelEffectsRequest, {"tokens": tokens, **fields})
    effects = EffectsOfPaths(model, request, stream)
    return at_once(effects.parts(copies or effects.copies))


def fields_of(end):
    return end.model_dump(exclude_none=True)


SENDS = {
    "text": ({"tokens": OTHER}, lambda _, other: other),
    "zero": ({}, lambda own, _: torch.zeros_like(own)),
    "mean": ({"set": "mean"}, lambda own, _: own.mean((0, 1)).expand_as(own)),
    "number": ({"set": 2.5}, lambda own, _: torch.full_like(own, 2.5)),
}


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((each, "text") for each in FAMILIES),
        *((each, change) for each in ("gpt2", "llama") for change in ("zero", "mean", "number")),
    ],
)
def test_each_path_has_the_effect_that_frozen_runs_of_plain_torch_have(family, change):
    sends, send = SENDS[change]
    found = paths(family, **{"from": EVERY | sends}, to=ALL, of={"token": 7})
    senders, receivers = found.swept["from"], found.swept["to"]
    plain = served(family)[2]
    tokens, other = torch.tensor([IDS]), torch.tensor([OTHER]) if change == "text" else None
    before = plain.run(tokens).logits[0, -1].double().log_softmax(-1)
    near(found.baseline, before[7])
    assert found.effects.value.shape == found.effects.divergence.shape == (len(senders), len(receivers)) == (10, 13)
    for row, sender in enumerate(senders):
        frozen = plain.frozen(tokens, fields_of(sender), send, other)
        for column, receiver in enumerate(receivers):
            value = found.effects.value[row, column]
            if np.isnan(value):
                assert sender.layer > receiver.layer or (sender.layer == receiver.layer and
                                                         (sender.part, receiver.part) != ("heads", "mlps"))  # fmt: skip
                continue
            after = plain.received(tokens, fields_of(receiver), frozen)[0, -1].double().log_softmax(-1)
            near(value, after[7] - before[7])
            near(found.effects.divergence[row, column], (before.exp() * (before - after)).sum())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_paths_between_heads_are_those_of_transformer_lens(family, tmp_path):
    """Version 4.3 of that library, where it is installed; of grouped keys and values it has no paths."""
    bridge = pytest.importorskip("transformer_lens.model_bridge")
    patching = pytest.importorskip("transformer_lens.patching")
    model, _, plain = served(family)
    plain.model.save_pretrained(tmp_path / family)
    tokenizer().save_pretrained(tmp_path / family)
    theirs = bridge.TransformerBridge.boot_transformers(str(tmp_path / family), device="cpu")
    tokens, other = torch.tensor([IDS]), torch.tensor([OTHER])
    _, before = theirs.run_with_cache(tokens)
    _, sent = theirs.run_with_cache(other)
    count = len(model.places)
    for part in ("q", "k", "v") if family == "gpt2" else ("q",):
        ours = paths(family, **{"from": {"layer": 0, "tokens": OTHER}}, to={"parts": [part]}, of={"token": 7})
        found = ours.effects.value.reshape(4, count, 4) + ours.baseline
        for head in range(4):
            expected = patching.get_act_patch_direct_path(
                theirs, tokens, sent, before, lambda logits: logits[0, -1].log_softmax(-1)[7], 0, head, part,
                verbose=False,
            )  # fmt: skip
            near(found[head, 1:], expected[1:].detach().numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_that_is_set_is_what_each_component_sends_into_the_stream(family):
    model, stream, _ = served(family)
    every = {"parts": ["heads", "mlps", "embeddings"]}
    changes = []
    for number in (0.0, 2.5):
        fields = {"tokens": IDS, "from": every | {"set": number}}
        effects = EffectsOfPaths(model, validate(ModelEffectsRequest, fields), stream)
        sent = at_once(effects.changes())
        changes.append([sent.of(sender) for sender in effects.ends.senders])
    for without, changed in zip(*changes, strict=True):
        near(changed - without, torch.full_like(changed, 2.5))


def test_what_all_components_send_sums_to_the_states():
    model, stream, plain = served("gpt2")
    fields = {"tokens": IDS, "from": {"parts": ["heads", "mlps", "embeddings"], "tokens": OTHER}}
    effects = EffectsOfPaths(model, validate(ModelEffectsRequest, fields), stream)
    sent = at_once(effects.changes())
    total = sum(sent.of(sender) for sender in effects.ends.senders)
    states = []
    handle = plain.layers[-1].register_forward_hook(lambda _, __, output: states.append(output))
    for tokens in (OTHER, IDS):
        plain.run(torch.tensor([tokens]))
    handle.remove()
    near(total, states[0] - states[1])


@pytest.mark.parametrize("copies", [1, 3, 64])
def test_padded_texts_have_the_numbers_of_each_alone(copies):
    texts, others = [IDS, IDS[3:8]], [OTHER, OTHER[3:8]]
    fields = {"to": ALL | {"layer": [1, 2]}, "of": {"token": 5}}
    together = paths("llama", copies, tokens=texts, **{"from": EVERY | {"layer": 0, "tokens": others}}, **fields)
    for at, (own, other) in enumerate(zip(texts, others, strict=True)):
        alone = paths("llama", tokens=own, **{"from": EVERY | {"layer": 0, "tokens": other}}, **fields)
        near(together.effects.value[at], alone.effects.value)
        near(together.effects.divergence[at], alone.effects.divergence)


def test_the_direct_path_of_a_head_without_output_is_its_edge_to_the_logits():
    found = paths("gpt2", **{"from": {"layer": 2}})
    assert [str(end) for end in found.swept["from"]] == ["2.0", "2.1", "2.2", "2.3"]
    assert [str(end) for end in found.swept["to"]] == ["logits"]
    assert found.token is not None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"from": {"layer": 9}}, "from.layer", "no attention"),
        ({"from": {"layer": [0, 9]}}, "from.layer.1", "no attention"),
        ({"from": {"heads": [1, 7]}}, "from.heads.1", "out of range"),
        ({"from": {}, "to": {"parts": ["k"], "heads": [4]}}, "to.heads.0", "out of range"),
        ({"from": {"layer": 2}, "to": {"layer": 1}}, "to", "name a later layer"),
        ({"from": {"tokens": IDS[:-1]}}, "from.tokens", "as many tokens as the input has"),
        ({"from": {"text": "the cat"}}, "from.text", "as many tokens"),
        ({"from": {"tokens": [IDS, IDS]}}, "from.tokens", "as many tokens"),
    ],
)
def test_paths_that_are_not_there_are_refused_by_their_field(fields, param, words):
    model, stream, _ = served("gpt2")
    with pytest.raises(InvalidRequest, match=words) as fault:
        EffectsOfPaths(model, validate(ModelEffectsRequest, {"tokens": IDS, **fields}), stream)
    assert fault.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "sweep"),
        ({"to": {}}, "to"),
        ({"from": {}, "sweep": {"tap": "context", "set": 0}}, "from"),
        ({"from": {}, "edits": {"0": [{"tap": "context", "set": 0}]}}, "edits"),
        ({"from": {"set": 0, "text": "the cat"}}, "from.set"),
        ({"from": {"set": np.nan}}, "from.set"),
        ({"from": {"parts": ["mlps"], "heads": [0]}}, "from.heads"),
        ({"from": {"parts": ["embeddings"], "layer": 0}}, "from.layer"),
        ({"from": {"layer": [1, 1]}}, "from.layer"),
        ({"from": {}, "to": {"parts": ["logits"], "layer": 1}}, "to.layer"),
        ({"from": {}, "to": {"parts": ["mlps"], "heads": [1]}}, "to.heads"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, param):
    with pytest.raises(InvalidRequest) as fault:
        validate(ModelEffectsRequest, {"tokens": IDS, **fields})
    assert fault.value.param == param


@pytest.mark.parametrize(("family", "words"), [("bert", "does not predict the next token"), ("t5", "not one stack")])
def test_models_whose_paths_are_not_known_are_refused_before_a_run(family, words):
    with pytest.raises(InvalidRequest, match=words) as fault:
        check_stack(loaded(family))
    assert fault.value.param == "from"


def test_a_layer_that_scales_the_states_that_it_is_given_is_refused():
    model, stream, _ = served("gpt2")
    with pytest.raises(InvalidRequest, match="more than sums") as fault:
        EffectsOfPaths(
            model, validate(ModelEffectsRequest, {"tokens": IDS, "from": {}}), replace(stream, unsummed_layer=1)
        )
    assert fault.value.param == "from"


@pytest.mark.parametrize(("to", "unable"), [({"parts": ["q", "mlps"]}, 1), ({"layer": [0, 2]}, 2), ({}, 2)])
def test_a_layer_at_which_no_pass_can_begin_is_refused_before_a_run_whichever_end_it_is(to, unable, monkeypatch):
    model, stream, _ = served("gpt2")
    able = {layer: layer != unable for layer in range(3)}
    monkeypatch.setattr(model.shared_layers, "_able", able)
    with pytest.raises(InvalidRequest, match=f"cannot begin at its layer {unable}") as fault:
        EffectsOfPaths(model, validate(ModelEffectsRequest, {"tokens": IDS, "from": {}, "to": to}), stream)
    assert fault.value.param == "from"


def test_one_trial_serves_all_layers_that_are_ends():
    model, stream, _ = served("gpt_neox")
    model.shared_layers._able.clear()
    fields = {"tokens": IDS, "from": {"parts": ["embeddings"]}, "to": {"parts": ["q"]}}
    with patch.object(model, "run", wraps=model.run) as runs:
        EffectsOfPaths(model, validate(ModelEffectsRequest, fields), stream)
    assert runs.call_count == 2 * (2 + 3)  # over one text, and over two
    assert model.shared_layers._able == dict.fromkeys(range(3), True)
