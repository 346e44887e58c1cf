"""Encoders that attend within windows: weights of every window, and the patches that its tokens are."""

import copy
from functools import cache, partial

import numpy as np
import pytest
import torch
from tests.conftest import live_server
from tests.cost.peaks import peaks
from tests.models.inputs.images.small_encoders import marked, noise, sent, sharp
from tests.models.small_models import near
from transformers import CONFIG_MAPPING, AutoModel, ViTImageProcessorPil

from attention_client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.runtime.device.torch_device import Device

WAYS = {"swin": "computed", "swinv2": "observed", "donut-swin": "observed"}
SIZES = {
    "image_size": [40, 56], "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3,
    "drop_path_rate": 0.0,
}  # fmt: skip
"""Patches are 10 by 14, so that windows of 3 are padded, and merge to 5 by 7."""
WINDOWS = [20, 20, 6, 6]
"""The windows of each layer."""
IMAGE, OTHER = noise(112, 80), noise(112, 80)[::-1].copy()
EXACT = 1e-5


class Auto:
    """Makes the model of any config, as one class does of its own."""

    @staticmethod
    def _from_config(config, **options):
        return AutoModel.from_config(config, **options)


@cache
def eager(kind):
    model = sharp(Auto, CONFIG_MAPPING[kind](**SIZES))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("bias"):  # of the keys and values of padding
            parameter.normal_(std=0.2)
    return model


@cache
def processor():
    return ViTImageProcessorPil(size={"height": 40, "width": 56})


@cache
def loaded(kind):
    return LoadedModel(kind, copy.deepcopy(eager(kind)), None, Device.open("cpu"), processor())


def own_weights(kind, images):
    """The weights ``[B·W, H, T, T]`` that each attention of transformers itself returns."""
    model, found = eager(kind), []
    modules = [each for each in model.modules() if type(each).__name__.endswith(("SwinAttention", "Swinv2Attention"))]

    def returned(_, __, output):
        found.append(output[1])

    hooks = [module.register_forward_hook(returned) for module in modules]
    try:
        with torch.no_grad():
            output = model(**processor()(images=images, return_tensors="pt"), output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found, output


@pytest.mark.parametrize("kind", WAYS)
def test_weights_of_every_window_are_those_of_the_eager_model(kind):
    model = loaded(kind)
    assert model_info(model)["attention"] == WAYS[kind]
    assert {layer.keys for layer in model_info(model)["layers"]} == {"windows"}
    taps = ["weights", "v", "context", "hidden"]
    for images in ([IMAGE], [IMAGE, OTHER]):
        reply = forward_reply(model, ModelForwardRequest(images=[sent(each) for each in images], return_=taps))
        expected, output = own_weights(kind, images)
        assert [len(layer.weights) for layer in reply.layers] == [count * len(images) for count in WINDOWS]
        for layer, own in zip(reply.layers, expected, strict=True):
            near(layer.weights, own, EXACT)
            near(layer.weights @ layer.v, layer.context, EXACT)
            assert len(reply.key_labels[layer.layer]) == len(layer.weights)
        last = np.asarray(reply.layers[-1].hidden).reshape(len(images), 35, 32)
        norm = getattr(eager(kind), "layernorm", torch.nn.Identity())
        near(norm(torch.tensor(last)), output.last_hidden_state, EXACT)


@pytest.mark.parametrize("kind", WAYS)
def test_a_changed_patch_changes_the_one_token_of_layer_0_that_is_labelled_so(kind):
    def values(image):
        return forward_reply(loaded(kind), ModelForwardRequest(images=[sent(image)], return_=["v"]))

    plain = values(IMAGE)
    assert plain.labels.patches[:2] == [(0, 0, 0), (0, 0, 1)]
    assert len(plain.labels.patches) == 140
    for at in (0, 40, 97, 139):
        changed = values(marked(IMAGE, plain.labels.rectangles[at]))
        change = abs(changed.layers[0].v - plain.layers[0].v).max((1, 3))
        window, token = np.unravel_index(change.argmax(), change.shape)
        queries, keys = plain.tokens_of("attention.0", int(window))
        assert queries is keys
        assert keys.patches[token] == plain.labels.patches[at]
        assert keys.rectangles[token] == plain.labels.rectangles[at]
        assert keys.tokens[token] == plain.labels.tokens[at]
    first = plain.tokens_of("attention.0", 4)[1]  # the last window of the first row has the patches of two columns
    assert first.tokens[:3] == ["[0,12]", "[0,13]", "padding"]
    assert first.patches[2] is None


@pytest.mark.parametrize("kind", WAYS)
def test_the_labels_of_shifted_windows_and_merged_patches_are_where_a_changed_state_goes(kind):
    reply = forward_reply(loaded(kind), ModelForwardRequest(images=[sent(IMAGE)], return_=["weights"]))
    blocks = [block for stage in eager(kind).encoder.layers for block in stage.blocks]
    for layer, (block, columns) in enumerate(zip(blocks, [14, 14, 7, 7], strict=True)):
        key = f"attention.{layer}"
        for at in (0, 1, columns, 5 * columns - 1):
            given = []

            def change(_, args, at=at, given=given):
                state = args[0].clone()
                state[:, at] += 3.0 * len(given) * torch.linspace(-1, 1, state.shape[-1])
                return (state, *args[1:])

            hooks = [
                block.register_forward_pre_hook(change),
                block.attention.register_forward_pre_hook(lambda _, args, given=given: given.append(args[0])),
            ]
            for _ in range(2):
                own_weights(kind, [IMAGE])
            for hook in hooks:
                hook.remove()
            apart = (given[1] - given[0]).abs().amax(-1)
            assert int((apart > 1e-6).sum()) == 1
            window, token = np.unravel_index(int(apart.argmax()), apart.shape)
            labels = reply.tokens_of(key, int(window))[1]
            assert labels.patches[token] == (0, at // columns, at % columns)
        every = [patch for labels in reply.key_labels[key] for patch in labels.patches if patch]
        assert len(every) == len({*every}) == (140 if columns == 14 else 35)
    merged = {
        patch: box
        for labels in reply.key_labels["attention.2"]
        for patch, box in zip(labels.patches, labels.rectangles, strict=True)
    }
    single = dict(zip(reply.labels.patches, reply.labels.rectangles, strict=True))
    assert merged[0, 1, 2] == (*single[0, 2, 4][:2], *single[0, 3, 5][2:])


@pytest.mark.parametrize("kind", WAYS)
def test_statistics_and_top_keys_are_those_of_the_windows(kind):
    reply = weights_reply(loaded(kind), ModelWeightsRequest(images=[sent(IMAGE)], top_k=2))
    for layer, own in zip(reply.layers, own_weights(kind, [IMAGE])[0], strict=True):
        near(layer.weights, own, EXACT)
        near(layer.top.weights, own.topk(2).values, EXACT)
        near(layer.statistics.entropy, -(own.double().xlogy(own.double())).sum(-1).mean(-1), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind != "swinv2" else kind for kind in WAYS]
)
def test_edits_and_gradients_of_windows_are_exact(kind):
    model = loaded(kind)
    edits = {"attention.1": [{"tap": "weights", "heads": [1], "set": 0}]}
    body = {"images": [sent(IMAGE)], "return": ["hidden"], "layers": ["attention.3"]}
    edited = forward_reply(model, validate(ModelForwardRequest, body | {"edits": edits}))
    plain = forward_reply(model, validate(ModelForwardRequest, body))
    by_context = {"attention.1": [{"tap": "context", "heads": [1], "set": 0}]}
    same = forward_reply(model, validate(ModelForwardRequest, body | {"edits": by_context}))
    near(edited.layers[0].hidden, same.layers[0].hidden, EXACT)
    assert abs(edited.layers[0].hidden - plain.layers[0].hidden).max() > 1e-3
    upstream = np.random.default_rng(0).standard_normal((35, 32)).astype(np.float32)
    given = {
        "images": [sent(IMAGE)],
        "of": {"upstream": upstream},
        "wrt": ["tokens", "weights", "hidden"],
        "check": True,
    }
    found = ModelGradients(model, validate(ModelGradientsRequest, given)).reply()
    assert found.tokens.shape == (140,)
    assert [layer.gradients["weights"].shape[0] for layer in found.layers] == WINDOWS
    assert [layer.gradients["hidden"].shape for layer in found.layers] == [(140, 16), (140, 16), (35, 32), (35, 32)]
    assert all(each.passed for each in found.check.values())


def test_what_windows_cannot_answer_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="within windows") as fault:
        weights_reply(loaded("swin"), ModelWeightsRequest(images=[sent(IMAGE)], keep=True))
    assert fault.value.param == "keep"
    edits = {"attention.0": [{"tap": "weights", "keys": [9], "set": 0}]}
    with pytest.raises(InvalidRequest, match="out of range"):
        weights_reply(loaded("swin"), validate(ModelWeightsRequest, {"images": [sent(IMAGE)], "edits": edits}))


@pytest.mark.long
def test_the_memory_of_windows_is_that_of_their_pairs():
    """Weights over all pairs of 16,384 patches would take 4 GB."""
    config = CONFIG_MAPPING["swin"](**SIZES | {"image_size": [512, 512], "window_size": 8})
    model = LoadedModel(
        "swin",
        sharp(Auto, config),
        None,
        Device.open("cpu"),
        ViTImageProcessorPil(size=dict.fromkeys(("height", "width"), 512)),
    )
    for options in ({"return_weights": False}, {"layers": ["attention.0"]}):
        request = validate(ModelWeightsRequest, {"images": [sent(IMAGE)], "statistics": ["entropy"]} | options)
        checked = check_request(model, request)
        needed = ModelCosts(model).memory.needed_bytes(checked, request)
        (held,) = peaks([partial(weights_reply, model, request, checked)])
        assert held < needed < 4 * held


@pytest.mark.slow
def test_windows_over_http(tmp_path):
    eager("swinv2").save_pretrained(tmp_path / "swinv2")
    processor().save_pretrained(tmp_path / "swinv2")
    with live_server(tmp_path) as url, Client(url) as client:
        reply = client.models.weights("swinv2", images=[sent(IMAGE)], layers=["attention.3"], top_k=1)
        info = client.models.get("swinv2")
        assert (info.attention, info.layers[3].keys, info.layers[3].heads) == ("observed", "windows", 4)
        (layer,) = reply.layers
        near(layer.weights, own_weights("swinv2", [IMAGE])[0][3], EXACT)
        assert reply.tokens_of("attention.3", 4)[1].patches[0] == (0, 4, 4)
        assert client.models.complexity("swinv2", images=[{"width": 112, "height": 80}]).prefill.flops > 0
