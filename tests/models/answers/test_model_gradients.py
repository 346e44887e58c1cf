"""Gradients of a whole model are those of its eager self, and hold against central differences."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import DECODERS, IDS, PAIRS, eager, loaded
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_service.models.answers.integrated_path import EmbeddingPath
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.costs.answer_parts import OwnTime, at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.points import EMBEDDINGS
from attention_service.runtime.device.torch_device import Device

FAMILIES = (*DECODERS, *PAIRS)


def gradients(family, **fields):
    return ModelGradients(loaded(family), ModelGradientsRequest(**fields)).reply()


def near(found, expected, tolerance=1e-4):
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, atol=tolerance * max(1e-6, abs(expected).max()))


def reference(family, ids, token):
    """L, its gradient by embedding, and by the weights of each attention, of the eager model."""
    model = eager(family)
    table = (model.get_encoder() if family in PAIRS else model).get_input_embeddings()
    held = []

    def hold(_module, _inputs, output):
        if not held:
            held.append(output.detach().requires_grad_())
            return held[0]
        return None

    hook = table.register_forward_hook(hold)
    given = {"input_ids": torch.tensor([ids])}
    if family in PAIRS:
        given["decoder_input_ids"] = loaded(family).reader.read(ModelForwardRequest(tokens=ids)).target.ids
    outputs = model(**given, output_attentions=True)
    hook.remove()
    weights = {}
    if family in PAIRS:
        for stack in ("encoder", "decoder", "cross"):
            found = getattr(outputs, f"{stack}_attentions")
            weights |= {f"{stack}.{number}": each for number, each in enumerate(found)}
    else:
        weights = dict(zip(loaded(family).places, outputs.attentions, strict=True))
    value = outputs.logits[0, -1].log_softmax(-1)[token]
    found = torch.autograd.grad(value, [held[0], *weights.values()])
    by_layer = {key: (w[0].detach(), g[0]) for key, w, g in zip(weights, weights.values(), found[1:], strict=True)}
    return value.detach(), held[0].detach()[0], found[0][0], by_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_eager_model(family):
    reply = gradients(family, tokens=IDS, of={"token": 7}, wrt=["tokens", "embeddings", "weights"])
    value, embedded, gradient, weights = reference(family, IDS, 7)
    near(reply.value, value)
    assert reply.token == [7]
    near(reply.embeddings, gradient)
    near(reply.tokens, (gradient * embedded).sum(-1))
    for each in reply.layers:
        layer, by_weight = weights[str(each.layer)]
        near(each.heads, (layer * by_weight).sum((1, 2)))
        near(each.gradients["weights"], by_weight)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5"])
def test_heads_alone_need_no_stages(family):
    """By the kernel of the forward pass, the same effects as stage by stage."""
    alone = gradients(family, tokens=IDS, of={"token": 7})
    whole = gradients(family, tokens=IDS, of={"token": 7}, wrt=["weights"])
    for ours, theirs in zip(alone.layers, whole.layers, strict=True):
        near(ours.heads, theirs.heads)
    assert "fused" in alone.ran.kernels or family == "gpt_oss"


@pytest.mark.parametrize(
    "family", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama", "gemma2", "gpt2"))]
)
def test_gradients_hold_against_central_differences(family):
    wrt = ["embeddings", "hidden", "q", "k", "v", "scores", "weights", "context", "output"]
    layers = ["cross.1", "encoder.0"] if family == "t5" else [1]
    edits = {str(layers[0]): [{"tap": "weights", "heads": [0], "scale": 0.5}]}
    reply = gradients(family, tokens=IDS[:5], wrt=wrt, layers=layers, edits=edits, check=True)
    assert {*reply.check} == {"embeddings", *(f"{layer}.{name}" for layer in layers for name in wrt[1:])}
    assert {name: each for name, each in reply.check.items() if not each.passed} == {}
    again = gradients(family, tokens=IDS[:5], layers=layers, edits=edits)
    near(again.value, reply.value)  # the model computes in float32 again
    assert loaded(family).model.dtype == torch.float32


def test_a_margin_is_the_difference_of_two_log_probabilities():
    margin = gradients("llama", tokens=IDS, of={"token": 7, "against": 4})
    one, other = (gradients("llama", tokens=IDS, of={"token": token}) for token in (7, 4))
    near(margin.value, one.value - other.value)
    near(margin.tokens, one.tokens - other.tokens)


def test_a_given_upstream_differentiates_the_logits():
    forward = forward_reply(loaded("llama"), ModelForwardRequest(tokens=IDS, return_=["logits"]))
    probabilities = torch.tensor(forward.logits[0]).softmax(-1)
    upstream = -probabilities
    upstream[7] += 1  # ∂ log p(7) / ∂ logits
    found = gradients("llama", tokens=IDS, of={"upstream": upstream[None].numpy()})
    whole = torch.zeros(len(IDS), len(upstream))
    whole[-1] = upstream
    everywhere = gradients("llama", tokens=IDS, of={"upstream": whole.numpy()})
    expected = gradients("llama", tokens=IDS, of={"token": 7})
    near(found.tokens, expected.tokens)
    near(everywhere.tokens, expected.tokens)
    assert found.token is None


@pytest.mark.parametrize(
    ("family", "steps"),
    [("gpt2", 50), *(pytest.param(family, 300, marks=pytest.mark.slow) for family in ("llama", "gemma2"))],
)
def test_integrated_gradients_sum_to_the_difference_from_the_baseline(family, steps):
    """Of the Llama, whose norms divide by ever smaller states, only along many steps."""
    found = gradients(family, tokens=IDS, of={"token": 7}, integrated=steps)
    near(found.tokens.sum(), found.value - found.baseline, 1e-2)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert", "t5"])
@pytest.mark.parametrize("points", [5, 64])
def test_points_that_are_one_batch_give_the_numbers_of_points_one_by_one(family, points):
    options = {"of": {"token": 7}, "integrated": 12, "by_head": False, "wrt": ["tokens", "embeddings"]}
    if family == "bert":
        options["of"] = {"upstream": np.ones((2, 1, eager("bert").config.hidden_size))}
    request = ModelGradientsRequest(tokens=IDS if family == "t5" else [IDS, IDS[:5]], **options)
    run = ModelGradients(loaded(family), request)
    assert run.joins
    one, several = run.reply(), ModelGradients(loaded(family), request).reply(points)
    near(several.tokens, one.tokens)
    near(several.embeddings, one.embeddings)
    near(several.baseline, one.baseline)


def test_edits_hold_in_each_of_several_points():
    edits = {"0": [{"tap": "weights", "heads": [0], "scale": 0.5}], "1": [{"tap": "v", "keys": [2], "set": 0.0}]}
    request = ModelGradientsRequest(tokens=IDS, of={"token": 7}, integrated=6, edits=edits)
    one, several = (ModelGradients(loaded("gpt2"), request).reply(points) for points in (1, 4))
    near(several.tokens, one.tokens, 1e-4)
    assert not np.allclose(one.tokens, gradients("gpt2", tokens=IDS, of={"token": 7}, integrated=6).tokens)


def test_points_are_as_many_as_fit_and_are_in_the_estimate():
    model = loaded("llama")
    costs, request = ModelCosts(model), ModelGradientsRequest(tokens=IDS, of={"token": 7}, integrated=64)
    checked = ModelGradients(model, request).checked
    assert costs.memory.points_at_once(checked, 64, 2**40) == 64
    assert costs.memory.points_at_once(checked, 64, 0) == 1
    some = costs.memory.points_at_once(checked, 64, 2**22)
    assert 1 < some < 64
    single = costs.memory.needed_bytes(checked, request)
    assert single < costs.memory.needed_bytes(checked, request, some) <= single + 2**20


@pytest.mark.slow
def test_integrated_gradients_that_float16_cannot_hold_are_refused():
    half = LoadedModel("half", deepcopy(eager("gemma2")).half(), None, Device.open("cpu"))
    request = ModelGradientsRequest(tokens=IDS, of={"token": 7}, integrated=20)
    with pytest.raises(InvalidRequest, match="exceed float16"):
        ModelGradients(half, request).reply()


def test_the_path_of_integrated_gradients_begins_where_the_number_is_that_of_zeros():
    """Every norm of Gemma 2 makes small states larger, so that 10 to the minus 12 is far from zero behind them all."""
    run = ModelGradients(loaded("gemma2"), ModelGradientsRequest(tokens=IDS, of={"token": 7}, integrated=2))
    embedded = run._runs.run().at[EMBEDDINGS].detach()
    path = EmbeddingPath(run._runs, OwnTime(), run._path, 1)
    decades, baseline = at_once(path.decades(embedded))
    start, far = path.values(embedded, [10.0**-decades, 1e-12])
    near(start, baseline, 1e-3)
    assert abs(far - baseline) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_texts_of_a_batch_have_their_own_gradients(family):
    texts = [IDS, IDS[:4]]
    if family == "bert":
        with pytest.raises(InvalidRequest, match="no prediction head"):
            gradients(family, tokens=texts)
        return
    batch = gradients(family, tokens=texts, wrt=["tokens", "hidden", "q"], of={"token": 7})
    for number, ids in enumerate(texts):
        single = gradients(family, tokens=ids, wrt=["tokens", "hidden", "q"], of={"token": 7})
        pads = len(IDS) - len(ids)
        near(batch.value[number], single.value)
        near(batch.tokens[number][pads:], single.tokens)
        assert not batch.tokens[number][:pads].any()
        for ours, theirs in zip(batch.layers, single.layers, strict=True):
            near(ours.heads[number], theirs.heads)
            near(ours.gradients["q"][number][:, pads:], theirs.gradients["q"])
            near(ours.gradients["hidden"][number][pads:], theirs.gradients["hidden"])


def test_a_selection_narrows_gradients_of_taps():
    whole = gradients("llama", tokens=IDS, wrt=["weights", "k"])
    some = gradients("llama", tokens=IDS, wrt=["weights", "k"], select={"heads": [3], "queries": [8, 2]}, layers=[0])
    [layer] = some.layers
    near(layer.gradients["weights"], whole.layers[0].gradients["weights"][[3]][:, [8, 2]])
    near(layer.gradients["k"], whole.layers[0].gradients["k"][[1]])
    near(layer.heads, whole.layers[0].heads)


def test_the_likeliest_token_is_the_default():
    forward = forward_reply(loaded("gpt2"), ModelForwardRequest(tokens=IDS))
    reply = gradients("gpt2", tokens=IDS)
    assert reply.token == [forward.predictions[0].top[0].id]
    assert float(reply.value) == pytest.approx(np.log(forward.predictions[0].top[0].probability), rel=1e-4)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("of.position", {"of": {"position": 9}}),
        ("of.token", {"of": {"token": 96}}),
        ("of.token", {"of": {"token": "the cat"}}),
        ("of.upstream", {"of": {"upstream": [[1.0, 2.0]]}}),
        ("select.heads", {"wrt": ["weights"], "select": {"heads": [4]}}),
    ],
)
def test_a_bad_request_names_its_field(field, request_):
    with pytest.raises(InvalidRequest) as fault:
        ModelGradients(loaded("llama"), ModelGradientsRequest.model_validate({"tokens": IDS} | request_))
    assert fault.value.param == field


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["qwen3_next", "xlstm", "olmo_hybrid"])
def test_heads_behind_a_norm_of_their_own_are_said_to_be_0_whatever_they_do(kind):
    """With values beside which the norm's ε is nothing, the first-order effect is 0, and removing a head tells."""
    model = built(kind).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "v_proj" in name or name.endswith((".v.weight", "in_proj_qkvz.weight")):
                parameter.mul_(30)
    own = LoadedModel(kind, model, tokenizer(), Device.open("cpu"))
    first = next(iter(own.implicit.values())).key
    reply = ModelGradients(own, ModelGradientsRequest(tokens=IDS, of={"token": 7}, layers=[first])).reply()
    (layer,) = reply.layers
    assert layer.heads_normed
    removed = {str(first): [{"tap": "context", "heads": [0], "set": 0}]}
    without = ModelGradients(
        own, ModelGradientsRequest(tokens=IDS, of={"token": 7}, edits=removed, by_head=False)
    ).reply()
    change = abs(float(without.value) - float(reply.value))
    assert abs(layer.heads[0]) < 1e-3 * change
    attending = [place.key for place in own.places.values()]
    if attending:
        others = (
            ModelGradients(own, ModelGradientsRequest(tokens=IDS, of={"token": 7}, layers=attending)).reply().layers
        )
        assert {each.heads_normed for each in others} == {None}
    own.close()


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_without_a_norm_are_not_said_to_have_one(family):
    assert {each.heads_normed for each in gradients(family, tokens=IDS, of={"token": 7}).layers} == {None}
