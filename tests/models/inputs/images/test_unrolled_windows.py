"""Hiera and ViTDet: windows of tokens that are not kept row by row, or of grids whose channels come first."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from tests.models.inputs.images.small_encoders import noise, sent, sharp
from tests.models.small_models import near
from transformers import HieraConfig, HieraForImageClassification, VitDetConfig, VitDetModel, ViTImageProcessorPil

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.runtime.device.torch_device import Device

IMAGE, OTHER = noise(64, 64), noise(64, 64)[::-1].copy()
EXACT = 1e-6
POOLED = ["attention.1", "attention.3", "attention.6"]
"""The layers of Hiera with pooled queries."""


def attention_of(module):
    return type(module).__name__ in {"HieraMaskUnitAttention", "VitDetAttention"}


@cache
def eager(kind):
    if kind == "vitdet":
        return sharp(VitDetModel, VitDetConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=32, pretrain_image_size=32,
            patch_size=4, window_size=3, window_block_indices=[0, 2], use_relative_position_embeddings=True,
        ))  # fmt: skip
    return sharp(HieraForImageClassification, HieraConfig(
        image_size=[64, 64], embed_dim=16, depths=[1, 2, 3, 2], num_heads=[1, 2, 4, 8], num_labels=3,
    ))  # fmt: skip


def processor(kind):
    return ViTImageProcessorPil(size=dict.fromkeys(("height", "width"), 32 if kind == "vitdet" else 64))


@cache
def loaded(kind):
    return LoadedModel(kind, copy.deepcopy(eager(kind)), None, Device.open("cpu"), processor(kind))


def own_weights(kind, images):
    """The weights ``[B·W, H, Q, K]`` of each attention of transformers itself, and its output."""
    model, found = eager(kind), []
    hooks = [
        module.register_forward_hook(lambda _, __, output: found.append(output[1]))
        for module in filter(attention_of, model.modules())
    ]
    try:
        with torch.no_grad():
            output = model(**processor(kind)(images=images, return_tensors="pt"), output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [each.transpose(1, 2).flatten(0, 1) if each.ndim == 5 else each for each in found], output


@pytest.mark.parametrize("kind", ["hiera", "vitdet"])
def test_weights_of_every_window_are_those_of_the_eager_model(kind):
    for images in ([IMAGE], [IMAGE, OTHER]):
        request = ModelForwardRequest(images=[sent(each) for each in images], return_=["weights", "v", "context"])
        reply = forward_reply(loaded(kind), request)
        own, _ = own_weights(kind, images)
        assert len(own) == (8 if kind == "hiera" else 3)
        for layer in reply.layers:
            expected = own[int(str(layer.layer).rpartition(".")[2])]
            whole = kind == "vitdet" and layer.layer == 1
            near(layer.weights, expected[0] if whole and len(images) == 1 else expected, EXACT)
            near(layer.weights @ layer.v, layer.context, 1e-5)
            if not whole:
                assert len(reply.key_labels[str(layer.layer)]) == len(layer.weights)


def test_the_labels_of_hiera_are_the_places_to_which_its_own_function_puts_its_states():
    reply = forward_reply(loaded("hiera"), ModelForwardRequest(images=[sent(IMAGE)], return_=["v"]))
    assert sorted(reply.labels.patches) == [(0, row, column) for row in range(16) for column in range(16)]
    model = eager("hiera")
    layers = [layer for stage in model.hiera.encoder.stages for layer in stage.layers]
    stage_of = [0, 1, 1, 2, 2, 2, 3, 3]
    for layer in reply.layers:
        number = int(str(layer.layer).rpartition(".")[2])
        stage, length = stage_of[number], 256 // 4 ** stage_of[number]
        for at in {0, 1, length // 2, length - 1}:
            states = []

            def change(_, args, at=at, states=states):
                states.append(args[0].clone())
                states[-1][:, at] += torch.linspace(-3, 3, args[0].shape[-1])
                return (states[-1], *args[1:])

            request = ModelForwardRequest(images=[sent(IMAGE)], return_=["v"], layers=[layer.layer])
            own = loaded("hiera").places[str(layer.layer)].layer
            hook = own.register_forward_pre_hook(change)
            found = forward_reply(loaded("hiera"), request).layers[0].v
            hook.remove()
            window, token = np.argwhere(abs(found - layer.v).max((1, 3)) > 1e-6).tolist()[0]
            assert (abs(found - layer.v).max((1, 3)) > 1e-6).sum() == 1
            marks = torch.zeros(1, length, 1)
            marks[0, at] = 1
            _, row, column, _ = model.hiera.encoder.reroll(marks, stage).nonzero()[0].tolist()
            assert reply.tokens_of(layer.layer, window)[1].patches[token] == (0, row, column)
    assert type(layers[0]).__name__ == "HieraLayer"


def test_layers_with_pooled_queries_are_named_and_refused():
    info = model_info(loaded("hiera"))
    assert [layer.layer for layer in info["layers"]] == ["attention.0", *(f"attention.{n}" for n in (2, 4, 5, 7))]
    assert sorted(info["without_weights"]) == POOLED
    with pytest.raises(InvalidRequest, match="queries are pooled") as fault:
        forward_reply(loaded("hiera"), ModelForwardRequest(images=[sent(IMAGE)], return_=["v"], layers=["attention.3"]))
    assert fault.value.param == "layers.0"


def test_classes_gradients_and_edits_of_hiera_are_exact():
    _, output = own_weights("hiera", [IMAGE])
    edits = {"attention.4": [{"tap": "weights", "heads": [1], "set": 0}]}
    plain = forward_reply(loaded("hiera"), ModelForwardRequest(images=[sent(IMAGE)], return_=["logits"]))
    near(plain.logits[0], output.logits[0], 1e-5)
    by_weights = forward_reply(
        loaded("hiera"),
        validate(ModelForwardRequest, {"images": [sent(IMAGE)], "return": ["logits"], "edits": edits}),
    )
    edits["attention.4"][0]["tap"] = "context"
    by_context = forward_reply(
        loaded("hiera"),
        validate(ModelForwardRequest, {"images": [sent(IMAGE)], "return": ["logits"], "edits": edits}),
    )
    near(by_weights.logits, by_context.logits, 1e-5)
    assert abs(by_weights.logits - plain.logits).max() > 1e-4
    request = {"images": [sent(IMAGE)], "of": {"token": "LABEL_1"}, "wrt": ["tokens", "weights"]}
    found = ModelGradients(loaded("hiera"), validate(ModelGradientsRequest, request)).reply()
    model, held = eager("hiera"), []

    def hold(_, __, output):
        held.append(output[0].detach().requires_grad_())
        return (held[0], *output[1:])

    hook = model.hiera.embeddings.register_forward_hook(hold)
    value = model(**processor("hiera")(images=[IMAGE], return_tensors="pt")).logits[0].log_softmax(-1)[1]
    hook.remove()
    (gradient,) = torch.autograd.grad(value, held)
    by_patch = (gradient * held[0]).sum(-1)[0].detach()
    order = [16 * row + column for _, row, column in found.labels.patches]
    near(found.tokens, by_patch[order], 1e-5)


def test_the_labels_of_vitdet_are_where_a_changed_patch_goes():
    def values(image):
        return forward_reply(loaded("vitdet"), ModelForwardRequest(images=[sent(image)], return_=["v"]))

    plain = values(IMAGE)
    labels = plain.labels
    assert labels.patches == [(0, row, column) for row in range(8) for column in range(8)]
    for at in (0, 11, 63):
        image = IMAGE.copy()
        left, top, right, bottom = map(round, labels.rectangles[at])
        image[top + 3 : bottom - 3, left + 3 : right - 3] += 55
        change = abs(values(image).layers[0].v - plain.layers[0].v).max((1, 3))
        window, token = np.unravel_index(change.argmax(), change.shape)
        assert plain.tokens_of(0, int(window))[1].patches[token] == labels.patches[at]
    assert plain.tokens_of(0, 8)[1].tokens[-1] == "padding"
    request = {"images": [sent(IMAGE)], "of": {"upstream": np.ones((64, 32), np.float32)}, "check": True}
    found = ModelGradients(loaded("vitdet"), validate(ModelGradientsRequest, request)).reply()
    assert found.tokens.shape == (64,)
    assert all(each.passed for each in found.check.values())
