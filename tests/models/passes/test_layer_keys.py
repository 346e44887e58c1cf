"""Layers whose keys are not the tokens of one text: compressed keys, and those of a decoder and its encoder."""

from functools import cache

import numpy as np
import orjson
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.process.reply_writing import lines_of

IDS = [5, 3, 7, 8, 6, 4, 9, 10, 11, 5, 3, 7, 8]
TOKENS = len(IDS)
SPANS = [range(4), range(8), range(4, 12)]
"""The tokens of each compressed key of layer 1, whose rate is 4."""
POSITIONAL = (
    "mean_distance", "signed_distance", "locality", "first_key", "sink_share", "own_position", "previous_token",
    "next_token", "duplicate_token", "induction",
)  # fmt: skip
OPTIONS = {"window": 2, "sinks": 20}


@cache
def loaded(kind):
    return LoadedModel(kind, built(kind).requires_grad_(False), tokenizer(), device())


def weights(kind, **fields):
    request = {"statistics": [*POSITIONAL, "entropy"], "statistic_options": OPTIONS, "top_k": 40} | fields
    return weights_reply(loaded(kind), validate(ModelWeightsRequest, request))


def counted(weights, places, queries, keys):
    """The statistics of ``weights [H, Q, K]`` by loops over their definitions; ``places``: of each key, or None."""
    sums = {name: np.zeros(len(weights)) for name in POSITIONAL}
    tokens = sum(place == j for j, place in enumerate(places))
    for head, rows in enumerate(weights):
        for i, row in enumerate(rows):
            shares = row / row.sum()
            known = [(j, place - i) for j, place in enumerate(places) if place is not None]
            near = sum(shares[j] for j, _ in known)
            sums["mean_distance"][head] += sum(shares[j] * abs(far) for j, far in known) / near
            sums["signed_distance"][head] += sum(shares[j] * far for j, far in known) / near
            sums["locality"][head] += sum(shares[j] for j, far in known if abs(far) <= OPTIONS["window"])
            sums["first_key"][head] += shares[0]
            sums["sink_share"][head] += shares[:tokens].sum()
            for name, step in (("own_position", 0), ("previous_token", -1), ("next_token", 1)):
                sums[name][head] += shares[i + step] if 0 <= i + step < tokens else 0
            earlier = [j for j in range(min(i, tokens)) if keys[j] == queries[i]]
            sums["duplicate_token"][head] += sum(shares[j] for j in earlier)
            sums["induction"][head] += sum(shares[j + 1] for j in earlier)
    return {name: total / weights.shape[1] for name, total in sums.items()}


def equal_to_counted(layer, places, queries, keys):
    expected = counted(np.asarray(layer.weights, np.float64), places, queries, keys)
    for name in POSITIONAL:
        near(getattr(layer.statistics, name), expected[name])


def test_a_layer_says_what_its_keys_are():
    kinds = {kind: [layer.keys for layer in model_info(loaded(kind))["layers"]] for kind in ("deepseek_v4", "t5gemma2")}
    assert kinds["deepseek_v4"] == ["compressed"] * 3  # of one that is compressed at a rate of 128 too
    assert kinds["t5gemma2"] == ["tokens", "tokens", "decoder + encoder", "decoder + encoder"]


def test_layers_of_merged_attention_are_named_by_their_stacks():
    assert list(loaded("t5gemma2").places) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_a_compressed_key_is_made_of_the_tokens_that_its_label_names():
    place = loaded("deepseek_v4").places["1"]
    assert list(place.compression.spans(TOKENS)) == SPANS
    hidden = torch.randn(1, TOKENS, 32, requires_grad=True)
    rank = place.module.q_a_proj.out_features
    kv, _ = place.module.compressor(hidden, torch.randn(1, TOKENS, rank), torch.arange(TOKENS)[None], None, 1)
    for at, span in enumerate(SPANS):
        (found,) = torch.autograd.grad(kv[0, 0, at].sum(), hidden, retain_graph=True)
        assert found[0].abs().sum(-1).nonzero()[:, 0].tolist() == [*span]


def test_compressed_keys_have_labels_and_positions():
    reply = weights("deepseek_v4", tokens=IDS)
    queries, keys = reply.tokens_of(1)
    assert len(queries.tokens) == TOKENS
    assert keys.tokens[TOKENS:] == ["[0…3]", "[0…7]", "[4…11]"]
    assert keys.ids == [*IDS, -1, -1, -1]
    layer = reply.layers[1]
    assert layer.weights.shape[-1] == len(keys.tokens)
    assert TOKENS <= layer.top.keys.max() < len(keys.tokens)
    equal_to_counted(layer, [*range(TOKENS), 1.5, 3.5, 7.5], IDS, keys.ids)
    assert reply.tokens_of(0)[1].tokens == queries.tokens  # too short for a key of 128 tokens


def test_a_compressed_key_has_the_characters_of_its_tokens():
    reply = weights("deepseek_v4", text="the cat sat on the mat")
    _, keys = reply.tokens_of(1)
    assert keys.spans[-1] == (keys.spans[0][0] if keys.spans[0] else 0, keys.spans[3][1])


def test_merged_keys_are_those_of_decoder_and_encoder():
    texts, target = ["the cat sat on", "a mat"], "die Katze"
    reply = weights("t5gemma2", text=texts, target=target, layers=["decoder.1", "encoder.0"])
    for at in range(2):
        queries, keys = reply.tokens_of("decoder.1", at)
        assert keys.tokens == [*queries.tokens, *reply.encoder_labels[at].tokens]
        places = [*range(len(queries.tokens)), *[None] * len(reply.encoder_labels[at].tokens)]
        layer = reply.layers[0]
        one = layer.model_copy(update={"weights": layer.weights[at], "statistics": at_text(layer.statistics, at)})
        equal_to_counted(one, places, queries.ids, keys.ids)
    assert reply.tokens_of("encoder.0", 0)[1] == reply.encoder_labels[0]
    assert set(reply.key_labels) == {"decoder.1"}


def at_text(statistics, at):
    return statistics.model_copy(update={name: getattr(statistics, name)[at] for name in POSITIONAL})


def test_edits_reach_the_keys_behind_the_tokens():
    hide = [{"tap": "weights", "keys": [15], "set": 0}]
    assert not weights("deepseek_v4", tokens=IDS, edits={"1": hide}).layers[1].weights[..., 15].any()
    with pytest.raises(InvalidRequest, match="16 is out of range; there are 16 keys"):
        weights("deepseek_v4", tokens=IDS, edits={"1": [{"tap": "weights", "keys": [16], "set": 0}]})


@pytest.mark.parametrize(("kind", "layer"), [("deepseek_v4", 1), ("t5gemma2", "decoder.1")])
def test_a_generated_token_has_the_keys_of_the_whole_pass(kind, layer):
    pairs, model = kind == "t5gemma2", loaded(kind)
    wanted = {"layers": [layer], "top_k": 40, "weights": True, "statistics": list(POSITIONAL)}
    fields = {"prompt": IDS, "temperature": 0, "max_tokens": 6, "attention": wanted | {"statistic_options": OPTIONS}}
    request = validate(CompletionRequest, {"model": kind} | fields)
    (whole,) = generate(model, request, plan_generation(model, request), lambda _: None).last
    tokens = orjson.loads(lines_of([whole]))["choices"][0]["attention"]
    assert len(tokens) == 6
    ids = [token["id"] for token in tokens]
    text = IDS if pairs else IDS + ids
    target = [model.reader._start, *ids] if pairs else None
    inputs = model.reader.read(validate(ModelForwardRequest, {"tokens": text}))
    whole = whole_pass(model, inputs, target, layer)
    rows = range(6) if pairs else range(TOKENS - 1, TOKENS + 5)
    for token, row in zip(tokens, rows, strict=True):
        found = np.asarray(token["layers"][0]["weights"])
        own, expected = row + 1, whole[:, row]
        total = expected.shape[1] - (TOKENS if pairs else len(text) // 4)
        near(found[:, :own], expected[:, :own], 1e-4)
        behind = expected[:, total:]
        near(found[:, own:], behind[:, : found.shape[1] - own], 1e-4)
        distance = token["layers"][0]["statistics"]["mean_distance"]
        places = [*range(own), *([np.nan] * TOKENS if pairs else [(s.start + s.stop - 1) / 2 for s in spans(own)])]
        far = np.abs(np.array(places) - row)
        known = np.isfinite(far)
        near(distance, (found[:, known] * far[known]).sum(1) / found[:, known].sum(1), 1e-4)


def spans(tokens):
    return loaded("deepseek_v4").places["1"].compression.spans(tokens)


def whole_pass(model, inputs, target, layer):
    """The weights ``[H, Q, K]`` of a layer over all tokens at once, by the model's own eager attention."""
    arguments = dict(inputs.arguments)
    if target is not None:
        arguments["decoder_input_ids"] = torch.tensor([target])
    eager = built(model.name)
    found = eager(**arguments, output_attentions=True, use_cache=False)
    if target is None:
        return found.attentions[layer][0].detach().numpy()
    number = int(str(layer).rpartition(".")[2])
    own, read = found.decoder_attentions[number], found.cross_attentions[number]
    return torch.cat([own, read], -1)[0].detach().numpy()


def test_edits_by_key_of_such_a_layer_are_refused_in_a_generation():
    edits = {"1": [{"tap": "weights", "keys": [2], "set": 0}]}
    request = validate(CompletionRequest, {"model": "x", "prompt": IDS, "attention": {"edits": edits}})
    with pytest.raises(InvalidRequest, match="layer 1 has the keys of compressed"):
        plan_generation(loaded("deepseek_v4"), request)


@pytest.mark.parametrize(("kind", "layer"), [("deepseek_v4", "layers.1"), ("t5gemma2", "decoder.1")])
def test_a_recording_says_whose_weights_it_cannot_hold(kind, layer):
    model = loaded(kind)
    fields = {"tokens": IDS, "keep": True, "return": ["q", "k", "context"]}
    recording = recorded_forward(model, validate(ModelForwardRequest, fields)).recording
    names = {name for name, _ in recording.tensors()}
    assert {f"{layer}.q", f"{layer}.context", f"{layer}.hidden"} <= names
    assert not {f"{layer}.weights", f"{layer}.k"} & names
    assert recording.unseen[layer].startswith("its keys are those of ")


def test_a_picture_of_such_a_layer_names_its_keys():
    drawn = weights("deepseek_v4", tokens=IDS, layers=[1]).plot("svg")
    assert "[4…11]" in drawn.data.decode()
