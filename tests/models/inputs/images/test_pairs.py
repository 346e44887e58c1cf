"""A pair of encoders reads texts, images or both, and their similarity and its gradient are those of its eager self."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.client.tiny_models import tokenizer
from tests.models.inputs.images.small_encoders import noise, processor, sent, sharp
from tests.models.small_models import near
from transformers import CONFIG_MAPPING

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.embeddings.pair_similarity import pair_similarity_reply, plan_pair_similarity
from attention_service.models.answers.embeddings.text_embeddings import embed, plan_embedding
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.folders.input_kinds import PAIRS
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

_TEXTS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_IMAGES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
           "image_size": 32, "patch_size": 8}  # fmt: skip
CLASSES = {
    "clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model", "metaclip_2": "MetaClip2Model",
    "chinese_clip": "ChineseCLIPModel", "altclip": "AltCLIPModel",
}  # fmt: skip
WHOLE = {"siglip", "siglip2"}
"""Types whose texts have all positions."""
TEXT, OTHER = "the cat sat", "a dog sat on the mat"


def eager(kind):
    texts, images = dict(_TEXTS), dict(_IMAGES)
    if kind in WHOLE:
        texts["projection_size"] = images["hidden_size"]
    if kind == "siglip2":
        images["num_patches"] = 25
        del images["image_size"]
    options = {} if kind in WHOLE else {"projection_dim": 20}
    config = CONFIG_MAPPING[kind](text_config=texts, vision_config=images, **options)
    return sharp(getattr(transformers, CLASSES[kind]), config)


def images_of(kind):
    return processor("siglip2_vision_model" if kind == "siglip2" else "clip_vision_model")


@cache
def loaded(kind):
    return LoadedModel(kind, eager(kind), tokenizer(), Device.open("cpu"), images_of(kind))


def ids_of(kind, text):
    ids = tokenizer()(text)["input_ids"]
    return torch.tensor([ids + [tokenizer().pad_token_id] * (16 - len(ids)) if kind in WHOLE else ids])


def prepared(kind, *images):
    names = {"pixel_values", "pixel_attention_mask", "spatial_shapes"}
    made = images_of(kind)(images=[Image.fromarray(each) for each in images], return_tensors="pt")
    return {name: x for name, x in made.items() if name in names}


def test_every_type_is_tested():
    assert set(CLASSES) == PAIRS


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", CLASSES)
def test_weights_of_both_towers_and_vectors_are_those_of_the_eager_model(kind):
    model, theirs, image = loaded(kind), eager(kind), noise()
    with torch.no_grad():
        text = theirs.get_text_features(ids_of(kind, TEXT), output_attentions=True)
        seen = theirs.get_image_features(**prepared(kind, image), output_attentions=True)
    reply = weights_reply(model, ModelWeightsRequest(text=TEXT, images=[sent(image)]))
    assert [layer.layer for layer in reply.layers] == [0, 1, "vision.0", "vision.1", "vision.2"]
    for layer, weights in zip(reply.layers, [*text.attentions, *seen.attentions], strict=True):
        count = layer.weights.shape[-1]
        near(np.reshape(layer.weights, weights[0, :, :count, :count].shape), weights[0, :, :count, :count])
    assert reply.labels.tokens[:3] == ["the", "cat", "sat"]
    assert reply.image_labels[0].patches[-1] == (0, 3, 3) or kind == "siglip2"
    assert model.reader.takes == ["text", "images"]
    for fields, expected in (({"text": TEXT}, text), ({"images": [sent(image)]}, seen)):
        alone = forward_reply(model, ModelForwardRequest(**fields, return_=["pooled", "weights", "hidden"]))
        near(alone.pooled, expected.pooler_output[0])
        for layer, weights in zip(alone.layers, expected.attentions, strict=True):
            count = layer.weights.shape[-1]
            near(layer.weights, weights[0, :, :count, :count])


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_similarity_of_a_text_and_an_image_and_its_gradients_are_those_of_the_eager_model(kind):
    model, theirs, images = loaded(kind), eager(kind), [noise(), noise(50, 80)]
    pairs = [[TEXT, sent(images[0])], [sent(images[1]), OTHER], [TEXT, OTHER], [sent(images[0]), sent(images[1])]]
    request = TextSimilarityRequest(pairs=pairs)
    reply = pair_similarity_reply(model, request, plan_pair_similarity(model, request))
    table, first = theirs.text_model.get_input_embeddings(), theirs.vision_model.encoder.layers[0]
    for index, pair in enumerate([[TEXT, images[0]], [images[1], OTHER], [TEXT, OTHER], images]):
        leaves, vectors = [], []

        def hold(_, __, output, leaves=leaves):
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        def hold_input(_, args, leaves=leaves):
            leaves.append(args[0].detach().requires_grad_())
            return (leaves[-1], *args[1:])

        for side in pair:
            is_text = isinstance(side, str)
            hook = table.register_forward_hook(hold) if is_text else first.register_forward_pre_hook(hold_input)
            read = theirs.get_text_features if is_text else theirs.get_image_features
            given = {"input_ids": ids_of(kind, side)} if is_text else prepared(kind, side)
            vectors.append(read(**given).pooler_output[0])
            hook.remove()
        cosine = torch.nn.functional.cosine_similarity(*vectors, dim=0)
        assert reply.similarity[index] == pytest.approx(float(cosine.detach()), abs=1e-5)
        for side, leaf, gradient in zip((0, 1), leaves, torch.autograd.grad(cosine, leaves), strict=True):
            expected = (gradient * leaf).sum(-1)[0].detach()
            found = [*reply.tokens[index][side]]
            labels = reply.labels[index][side]
            assert len(found) == len(labels.tokens)
            count = min(len(found), len(expected))
            near(found[:count], expected[:count], 1e-4)
            near(found[count:], np.zeros(len(found) - count))
    plain = request.model_copy(update={"gradients": False})
    without = pair_similarity_reply(model, plain, plan_pair_similarity(model, plain))
    assert without.tokens is None
    near(without.similarity, reply.similarity)


def test_the_vectors_of_texts_are_those_that_similarity_compares():
    model = loaded("clip")
    request = EmbeddingRequest(model="clip", input=[TEXT, OTHER])
    one, other = (np.array(each.embedding) for each in embed(model, request, plan_embedding(model, request)).data)
    pairs = TextSimilarityRequest(pairs=[[TEXT, OTHER]])
    expected = pair_similarity_reply(model, pairs, plan_pair_similarity(model, pairs)).similarity[0]
    assert one.shape == (20,)
    assert float(one @ other) == pytest.approx(expected, abs=1e-5)
    near([np.linalg.norm(one)], [1.0])
    whole = request.model_copy(update={"normalize": False})
    (unscaled, _) = (np.array(each.embedding) for each in embed(model, whole, plan_embedding(model, whole)).data)
    assert abs(np.linalg.norm(unscaled) - 1) > 0.01
    near(unscaled / np.linalg.norm(unscaled), one)


@pytest.mark.slow
def test_gradients_of_one_tower_are_those_of_central_differences():
    model = loaded("clip")
    for fields, width, count in (({"text": TEXT}, 32, 3), ({"images": [sent(noise())]}, 24, 17)):
        upstream = np.random.default_rng(1).normal(size=(count, width)).astype(np.float32)
        request = ModelGradientsRequest(**fields, of={"upstream": upstream}, wrt=["tokens", "weights"], check=True)
        reply = ModelGradients(model, request).reply()
        assert len(reply.check) > 2
        assert all(each.passed for each in reply.check.values())


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        (ModelWeightsRequest, {"text": TEXT, "layers": ["vision.0"]}, "layers.0", "sees images; send one"),
        (ModelWeightsRequest, {"images": "one", "layers": [1]}, "layers.0", "reads texts; send one"),
        (ModelWeightsRequest, {"text": TEXT, "edits": {"vision.0": [{"tap": "weights", "set": 0}]}}, "edits.vision.0",
         "sees images"),
        (ModelForwardRequest, {"text": TEXT, "images": "one", "return_": ["pooled"]}, "return", "a pooled vector each"),
        (ModelForwardRequest, {"messages": [{"role": "user", "content": "hi"}]}, "messages", "texts and images alone"),
    ],
)  # fmt: skip
def test_what_a_pair_cannot_answer_is_named(kind, fields, param, message):
    fields = {**fields, **({"images": [sent(noise())]} if "images" in fields else {})}
    answer = forward_reply if kind is ModelForwardRequest else weights_reply
    with pytest.raises(InvalidRequest, match=message) as caught:
        answer(loaded("clip"), kind(**fields))
    assert caught.value.param == param


def test_a_side_that_cannot_be_read_is_named():
    model = loaded("clip")
    for pairs, place in (
        ([[TEXT, sent(noise())], [TEXT, {"base64": "AAAA"}]], "pairs.1.1"),
        ([[TEXT, TEXT], ["the " * 30, sent(noise())]], "pairs.1.0"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            plan_pair_similarity(model, TextSimilarityRequest(pairs=pairs))
        assert caught.value.param == place
    with pytest.raises(InvalidRequest) as caught:
        plan_pair_similarity(model, TextSimilarityRequest(pairs=[[TEXT, TEXT]], pooling="mean"))
    assert caught.value.param == "pooling"
    with pytest.raises(InvalidRequest, match="similarity is differentiated"):
        ModelGradients(model, ModelGradientsRequest(text=TEXT, images=[sent(noise())], of={"upstream": [[1.0]]}))


def test_costs_count_the_text_and_the_image_each_in_its_tower():
    costs = ModelCosts(loaded("clip"))
    request = ModelComplexityRequest(length=4, images=[{"width": 90, "height": 60}])
    reply = costs.report(request, 2**30)
    assert (reply.images[0].tokens, reply.images[0].vision_tokens) == (0, 17)
    text = costs.report(ModelComplexityRequest(length=4), 2**30)
    assert reply.prefill.flops == text.prefill.flops + reply.vision.flops


def test_a_text_and_an_image_are_recorded_as_two_stacks():
    for fields in ({"text": TEXT, "images": [sent(noise())]}, {"text": TEXT}, {"images": [sent(noise())]}):
        model = loaded("clip")
        recording = recorded_weights(model, ModelWeightsRequest(**fields, keep=True)).recording
        stacks = {name.partition(".")[0] for name in (each.name for each in recording.attentions)}
        assert stacks == {name for name, field in (("layers", "text"), ("vision", "images")) if field in fields}
