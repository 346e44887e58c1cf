"""An encoder of images gives the numbers of its eager self, and its labels say which pixels each token shows."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.models.inputs.images.small_encoders import (
    ENCODERS,
    HEADS,
    MASKED,
    eager,
    loaded,
    marked,
    noise,
    processor,
    sent,
    sharp,
)
from tests.models.small_models import near
from transformers import CONFIG_MAPPING, ViTImageProcessorPil

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_service.models.answers.embeddings.text_embeddings import plan_embedding
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.answers.tokenized_inputs import tokenize
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel


def reference(kind, *images, patches=None):
    """The run of transformers itself; ``patches``: those that a model with a mask is to see, in this order."""
    made = processor(kind)(images=[Image.fromarray(each) for each in images], return_tensors="pt")
    if kind in MASKED:
        made["noise"] = torch.full((1, 16), 99.0)
        for order, (_, row, column) in enumerate(patches):
            made["noise"][0, 4 * row + column] = order
    with torch.no_grad():
        return eager(kind)(**made, output_attentions=True, output_hidden_states=True)


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", ENCODERS)
def test_weights_and_states_are_those_of_the_eager_model(kind):
    model, image = loaded(kind), noise()
    returns = ["weights", "hidden", *(["logits"] if kind in HEADS else [] if kind in MASKED else ["pooled"])]
    reply = forward_reply(model, ModelForwardRequest(images=[sent(image)], return_=returns))
    expected = reference(kind, image, patches=[each for each in reply.labels.patches if each])
    count = reply.layers[0].weights.shape[-1]
    for layer, weights, hidden in zip(reply.layers, expected.attentions, expected.hidden_states[1:], strict=True):
        near(layer.weights, weights[0, :, :count, :count])
        near(layer.hidden, hidden[0, :count], 1e-4)
    assert len(reply.labels.tokens) == len(reply.labels.patches) == count
    if kind in HEADS:
        near(reply.logits[0], expected.logits[0])
        best = int(expected.logits[0].argmax())
        assert reply.predicts == "class"
        assert (reply.predictions[0].top[0].id, reply.predictions[0].top[0].token) == (best, f"LABEL_{best}")
    elif kind not in MASKED:
        names = ("image_embeds", "pooler_output")
        near(reply.pooled, next(x for name in names if (x := getattr(expected, name, None)) is not None)[0], 1e-4)


@pytest.mark.sampled(kind=5)
@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("size", [(96, 64), (70, 130)])
def test_a_marked_rectangle_changes_the_token_whose_label_it_is_and_no_other(kind, size):
    model, image = loaded(kind), noise(*size)

    def embeddings(pixels):
        reply = forward_reply(model, ModelForwardRequest(images=[sent(pixels)], return_=["hidden"]))
        return reply.entered, reply.labels

    plain, labels = embeddings(image)
    shown = [number for number, each in enumerate(labels.rectangles) if each is not None]
    assert len({labels.patches[number] for number in shown}) == len(shown)
    for number in (shown[0], shown[len(shown) // 2 + 1], shown[-1]):
        found, _ = embeddings(marked(image, labels.rectangles[number]))
        assert np.flatnonzero(abs(found - plain).max(-1) > 1e-6).tolist() == [number]
        _, row, column = labels.patches[number]
        assert labels.tokens[number] == f"[{row},{column}]"


@pytest.mark.slow
def test_the_patches_that_a_model_with_a_mask_sees_are_chosen_by_the_seed():
    def seen(**fields):
        reply = weights_reply(loaded("vit_mae"), ModelWeightsRequest(images=[sent(noise())], **fields))
        assert reply.labels.tokens[0] == "CLS"
        return reply.labels.tokens[1:], reply.layers[0].weights

    (first, weights), (again, same), (other, _) = seen(), seen(mask_seed=0), seen(mask_seed=1)
    assert len(first) == int(16 * 0.3)
    assert first == again == sorted(first, key=lambda name: [*map(int, name.strip("[]").split(","))])
    np.testing.assert_array_equal(weights, same)
    assert other != first
    seeds = {name for seed in range(40) for name in seen(mask_seed=seed)[0]}
    assert len(seeds) == 16  # each patch is seen with some seed
    images = [sent(noise()), sent(noise(50, 80))]
    batch = weights_reply(loaded("vit_mae"), ModelWeightsRequest(images=images))
    near(
        batch.layers[1].weights[0],
        weights_reply(loaded("vit_mae"), ModelWeightsRequest(images=images[:1])).layers[1].weights,
    )
    assert [each.tokens[1].partition(":")[2] for each in batch.labels] == [first[0].strip("[")] * 2


def test_tokens_that_are_no_patches_have_names():
    def tokens(kind):
        return forward_reply(loaded(kind), ModelForwardRequest(images=[sent(noise())])).labels.tokens

    assert tokens("vit")[:2] == ["CLS", "[0,0]"]
    assert tokens("dinov3_vit")[:5] == ["CLS", "register 0", "register 1", "register 2", "[0,0]"]
    assert tokens("siglip_vision_model")[0] == "[0,0]"
    assert tokens("yolos")[-7:] == [f"object {number}" for number in range(7)]


def test_a_crop_shows_the_middle_of_the_image():
    labels = forward_reply(loaded("clip_vision_model"), ModelForwardRequest(images=[sent(noise(120, 60))])).labels
    first, last = labels.rectangles[1], labels.rectangles[-1]
    near([*first[:2], *last[2:]], [36, 6, 84, 54], 0.3)  # 40 / 60 of its size, then 32 × 32 of its middle


@pytest.mark.parametrize("kind", ["vit", "siglip2_vision_model"])
def test_several_images_are_one_batch(kind):
    model, images = loaded(kind), [sent(noise()), sent(noise(50, 80))]
    batch = weights_reply(model, ModelWeightsRequest(images=images, top_k=1))
    for number, image in enumerate(images):
        single = weights_reply(model, ModelWeightsRequest(images=[image], top_k=1))
        count = len(single.labels.tokens)
        for ours, theirs in zip(batch.layers, single.layers, strict=True):
            near(ours.weights[number][:, :count, :count], theirs.weights)
            near(ours.statistics.entropy[number], theirs.statistics.entropy)
        assert [each and each[1:] for each in batch.labels[number].patches[:count]] == [
            each and each[1:] for each in single.labels.patches
        ]


def test_gradients_of_a_class_are_those_of_the_eager_model():
    image = noise()
    reply = ModelGradients(
        loaded("vit"),
        ModelGradientsRequest(images=[sent(image)], of={"token": "LABEL_3"}, wrt=["tokens", "embeddings"], check=True),
    ).reply()
    model, held = eager("vit"), []
    hook = model.vit.encoder.layer[0] if hasattr(model.vit, "encoder") else model.vit.layers[0]
    hook.register_forward_pre_hook(lambda _, given: (held.append(given[0].detach().requires_grad_()), (held[0],))[1])
    made = processor("vit")(images=[Image.fromarray(image)], return_tensors="pt")
    value = model(**made).logits[0].log_softmax(-1)[3]
    (expected,) = torch.autograd.grad(value, held)
    near(reply.embeddings, expected[0], 1e-4)
    near(reply.tokens, (expected[0] * held[0][0]).sum(-1).detach(), 1e-4)
    assert all(each.passed for each in reply.check.values())


def test_gradients_of_an_encoder_without_a_head_are_of_its_last_states():
    upstream = np.zeros((17, 32), np.float32)
    upstream[0, 5] = 1.0
    request = ModelGradientsRequest(images=[sent(noise())], of={"upstream": upstream}, check=True)
    reply = ModelGradients(loaded("clip_vision_model"), request).reply()
    assert all(each.passed for each in reply.check.values())
    with pytest.raises(InvalidRequest) as fault:
        ModelGradients(loaded("clip_vision_model"), ModelGradientsRequest(images=[sent(noise())]))
    assert fault.value.param == "of"


def test_edits_and_costs_of_an_encoder():
    model = loaded("vit")
    request = ModelForwardRequest(
        images=[sent(noise())], edits={"1": [{"tap": "context", "heads": [0], "set": 0}]}, compare="unedited"
    )
    assert forward_reply(model, request).predictions[0].divergence > 0
    costs = ModelCosts(model)
    assert costs.memory.needed_bytes(check_request(model, request), request) > 0


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"text": "the cat"}, "text"),
        ({"images": [sent(noise())], "text": "the cat"}, "text"),
        ({"images": [sent(noise())], "positions": [3]}, "positions"),
        ({"images": [sent(noise())], "mask_seed": 1}, "mask_seed"),
        ({"images": [sent(noise())], "layers": [2], "return": ["weights"]}, "layers.0"),
        ({"images": [sent(noise())], "return_": ["pooled"]}, "return"),
    ],
)
def test_what_an_encoder_does_not_take_is_named(request_, param):
    with pytest.raises(InvalidRequest) as fault:
        forward_reply(loaded("vit"), ModelForwardRequest(**request_))
    assert fault.value.param == param


@pytest.mark.parametrize(
    ("ask", "request_", "param"),
    [
        (plan_embedding, EmbeddingRequest(model="vit", input="the cat"), "model"),
        (tokenize, TokenizeRequest(model="vit", prompt="the cat"), "prompt"),
        (tokenize, TokenizeRequest(model="vit", prompt="the cat", add_special_tokens=False), "prompt"),
    ],
)
def test_an_encoder_says_that_it_reads_only_images_to_a_question_about_a_text(ask, request_, param):
    with pytest.raises(InvalidRequest, match="this model reads only images") as fault:
        ask(loaded("vit"), request_)
    assert fault.value.param == param


_PICTURE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_PICTURE |= {"image_size": 16, "patch_size": 8}
_PAIR = {"vision_config": _PICTURE, "text_config": {"hidden_size": 16, "num_hidden_layers": 1}}
CLASSIFIERS = {
    "DeiTForImageClassificationWithTeacher": ("deit", _PICTURE),
    "SiglipForImageClassification": ("siglip", _PAIR),
    "CLIPForImageClassification": ("clip", _PAIR),
}


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_loaded_with_their_classes(name, tmp_path):
    kind, options = CLASSIFIERS[name]
    own = sharp(getattr(transformers, name), CONFIG_MAPPING[kind](**options, num_labels=5))
    own.save_pretrained(tmp_path)
    resizes = ViTImageProcessorPil(size={"height": 16, "width": 16})
    resizes.save_pretrained(tmp_path)
    model = LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    request = ModelForwardRequest(images=[sent(noise())], return_=["logits", "weights"])
    reply = forward_reply(model, request)
    expected = own(**resizes(images=[noise()], return_tensors="pt"), output_attentions=True)
    np.testing.assert_allclose(reply.logits[0], expected.logits[0], atol=1e-5)
    np.testing.assert_allclose(reply.layers[0].weights, expected.attentions[0][0], atol=1e-5)
    assert ModelCosts(model).memory.needed_bytes(check_request(model, request), request) > 0
    model.close()
