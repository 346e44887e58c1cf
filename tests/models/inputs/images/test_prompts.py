"""A model that reads text with images gives its eager self's numbers, and its labels say which pixels a token shows."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from tests.models.inputs.images.small_encoders import MARGIN, marked, middle_of, noise, png, sent
from tests.models.inputs.images.small_prompts import PROMPTS, eager, loaded, processor, tokenizer
from tests.models.small_models import near
from tools.models_walk.eager_runs import eager_weights

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_service.models.answers.context.context_plan import plan_context
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.module_hooks import before
from attention_service.runtime.device.torch_device import Device

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # of PaliGemma's processor
TEXT = "what is on the mat"
SIZE = (60, 44)


def prompt(kind, *images, text=TEXT):
    made = processor(kind)(
        text=[loaded(kind).reader.before * len(images) + text], images=[Image.fromarray(each) for each in images],
        return_tensors="pt", return_mm_token_type_ids=True,
    )  # fmt: skip
    names = loaded(kind).reader.names
    return {name: x for name, x in made.items() if name in names}


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_and_weights_are_those_of_the_eager_model(kind):
    images = [noise(*SIZE), noise(40, 40)]
    request = {"text": TEXT, "images": [sent(each) for each in images]}
    reply = forward_reply(loaded(kind), ModelForwardRequest(**request, return_=["weights", "logits"]))
    model, arguments = eager(kind), prompt(kind, *images)
    with torch.no_grad():
        expected = model(**arguments, output_attentions=True)
    near(reply.logits[0], expected.logits[0, -1], 1e-4)
    layers = {str(each.layer): each.weights for each in reply.layers}
    for number, weights in enumerate(expected.attentions):
        near(layers[str(number)], weights[0])
    seen = [each for each in eager_weights(model, arguments) if each.shape[-1] != layers["0"].shape[-1]]
    for number in (0, 1):
        whole = layers[f"vision.{number}"]
        assert whole.shape[0] == len(reply.image_labels)
        assert whole.shape[-1] == len(reply.image_labels[0].tokens)
        near(whole.sum(-1), 1)
    if "qwen" not in kind:
        near(layers["vision.0"][0], seen[0])
        near(layers["vision.1"][0], seen[1])
    else:  # eager attention runs window by window, or image by image
        at = 0
        for number in (0, 1):
            expected_whole, start = np.zeros_like(layers["vision.0"][0]), 0
            while start < expected_whole.shape[-1]:
                stop = start + seen[at].shape[-1]
                expected_whole[:, start:stop, start:stop], start, at = seen[at], stop, at + 1
            near(layers[f"vision.{number}"][0], expected_whole)
        assert at == len(seen)


def unmixed(kind):
    """Edits after which every patch goes through the model that sees by itself."""
    return {key: [{"tap": "context", "set": 0}] for key in loaded(kind).places if key.startswith("vision.")}


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", PROMPTS)
def test_a_marked_rectangle_changes_the_tokens_whose_labels_show_it_and_no_other(kind):
    model, image = loaded(kind), noise(*SIZE)
    first = model.places["vision.0"].first_layer

    def states(pixels):
        kept = []
        undo = before(first, lambda state: kept.append(state.numpy().copy()))
        request = {"text": TEXT, "images": [sent(noise(32, 32)), sent(pixels)]}
        reply = forward_reply(model, ModelForwardRequest(**request, return_=["hidden"], edits=unmixed(kind)))
        undo()
        return reply, [(reply.labels, reply.entered), *zip(reply.image_labels, kept[0], strict=True)]

    _, plain = states(image)
    for stack in range(0, len(plain), 3):
        labels = plain[stack][0]
        shown = [at for at, each in enumerate(labels.patches) if each and each[0] == 1 and labels.rectangles[at]]
        for token in shown[:: max(1, len(shown) - 1)][:2]:
            region = middle_of(labels.rectangles[token])
            _, changed = states(marked(image, labels.rectangles[token]))
            for (label, old), (_, new) in zip(plain, changed, strict=True):
                found = {*np.flatnonzero(abs(new - old).max(-1) > 1e-6).tolist()}
                own = {at: label.rectangles[at] for at, each in enumerate(label.patches) if each and each[0] == 1}
                assert {at for at, each in own.items() if each and overlap(each, region, 0)} <= found
                assert found <= {at for at, each in own.items() if each and overlap(each, region, MARGIN)}
                assert label is not labels or len([at for at in found if label.crops[at] == label.crops[token]]) == 1


def overlap(rectangle, region, margin):
    """True if a rectangle, with a margin of its own size around it, and a region have pixels in common."""
    left, top, right, bottom = rectangle
    across, down = (right - left) * margin, (bottom - top) * margin
    return (
        min(right + across, region[2]) - max(left - across, region[0]) > 0.1
        and min(bottom + down, region[3]) - max(top - down, region[1]) > 0.1
    )


def test_labels_of_a_prompt_are_words_marks_and_patches():
    labels = forward_reply(loaded("gemma3"), ModelForwardRequest(text=TEXT, images=[sent(noise(*SIZE))])).labels
    assert labels.tokens == ["<boi>", "[0,0]", "[0,1]", "[1,0]", "[1,1]", "<eoi>", *TEXT.split()]
    assert [TEXT[slice(*each)] for each in labels.spans if each] == TEXT.split()
    assert labels.patches[:3] == [None, (0, 0, 0), (0, 0, 1)]
    assert labels.rectangles[4] == (30.0, 22.0, 60.0, 44.0)
    tiled = forward_reply(loaded("smolvlm"), ModelForwardRequest(text=TEXT, images=[sent(noise(*SIZE))])).labels
    assert "[0,0]/4" in tiled.tokens
    assert max(each for each in tiled.crops if each is not None) == 4


def test_rows_of_an_image_of_any_resolution_end_in_a_token_that_is_no_patch():
    reply = forward_reply(loaded("llava_next"), ModelForwardRequest(text=TEXT, images=[sent(noise(60, 30))]))
    labels, tokens = reply.labels, reply.labels.tokens[: -len(TEXT.split())]
    assert tokens[:16] == [f"[{row},{column}]/0" for row in range(4) for column in range(4)]
    assert tokens[16:25] == [*(f"[0,{column}]/1" for column in range(4)), *(f"[0,{column}]/2" for column in range(4)),
                             "row end"]  # fmt: skip
    assert [at for at, each in enumerate(labels.patches[: len(tokens)]) if each is None] == [24, 33, 42, 51]
    assert (labels.rectangles[0], labels.rectangles[16]) == ((0, 0, 15, 7.5), (0, 0, 7.5, pytest.approx(7, abs=0.6)))


def test_patches_that_a_model_mixes_have_no_place():
    made, model = copy.copy(processor("llava_onevision")), eager("llava_onevision")
    made.vision_aspect_ratio = model.config.vision_aspect_ratio = "anyres_max_1"
    mixing = LoadedModel("mixing", model, tokenizer(), Device.open("cpu"), made)
    labels = forward_reply(mixing, ModelForwardRequest(text=TEXT, images=[sent(noise(60, 60))])).labels
    places, ends = labels.tokens.count("<image>"), labels.tokens.count("row end")
    assert labels.patches[:16] == [(0, row, column) for row in range(4) for column in range(4)]
    assert places + ends == len(labels.tokens) - 16 - len(TEXT.split()) == 4 * 5
    assert ends == 4
    mixing.close()


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_an_image_stands_where_its_mark_or_its_part_says(kind):
    mark, image = processor(kind).image_token, sent(noise(32, 32))

    def tokens(**request):
        reply = forward_reply(loaded(kind), ModelForwardRequest(**request, images=[image]))
        return [token for token in reply.labels.tokens if token != "[0,0]" and not token.startswith("[")]

    assert tokens(text=f"what is {mark} on") == ["what", "is", "on"]
    parts = [{"type": "text", "text": "what is"}, {"type": "image"}, {"type": "text", "text": "on"}]
    found = tokens(messages=[{"role": "user", "content": parts}])
    assert found == ["user", ":", "what", "is", "on", "assistant", ":"]
    assert tokens(messages=[{"role": "user", "content": "the mat"}])[2:4] == ["the", "mat"]
    inside = forward_reply(
        loaded(kind), ModelForwardRequest(messages=[{"role": "user", "content": parts}], images=[image])
    )
    assert inside.labels.patches[:4] == [None] * 4
    assert inside.labels.patches[4] == (0, 0, 0)


def test_text_alone_is_read_as_by_the_text_model():
    model = loaded("llava")
    reply = weights_reply(model, ModelWeightsRequest(text=TEXT))
    assert [each.layer for each in reply.layers] == [0, 1]
    assert reply.image_labels is None
    assert reply.labels.patches is None


SLOW_TO_CHECK = {"smolvlm", "llava", "llava_next", "llava_onevision", "qwen3_vl", "internvl", "paligemma"}
"""Models whose gradients pass what those of others pass too."""


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW_TO_CHECK else ()) for kind in PROMPTS]
)
def test_gradients_pass_from_a_word_to_the_heads_that_see_the_image(kind):
    request = ModelGradientsRequest(
        text=TEXT, images=[sent(noise(*SIZE))], of={"token": 7}, wrt=["tokens", "weights", "hidden"], check=True,
        layers=[0, "vision.0"],
    )  # fmt: skip
    reply = ModelGradients(loaded(kind), request).reply()
    assert all(each.passed for each in reply.check.values()), reply.check
    vision = next(each for each in reply.layers if each.layer == "vision.0")
    assert len(reply.tokens) == len(reply.labels.tokens)
    assert abs(vision.heads).min() > 0
    assert vision.gradients["weights"].shape[-1] == len(reply.image_labels[0].tokens)


def test_statistics_costs_and_a_recording_of_a_prompt():
    model = loaded("gemma3")
    request = ModelWeightsRequest(text=TEXT, images=[sent(noise(*SIZE))], top_k=2, keep=True)
    found = recorded_weights(model, request)
    reply, recording = found.reply, found.recording
    assert {str(each.layer): each.statistics.entropy.shape for each in reply.layers} == {
        "0": (4,), "1": (4,), "vision.0": (1, 4), "vision.1": (1, 4),
    }  # fmt: skip
    assert recording.tokens["layers"] == reply.labels.tokens
    near(recording.layers["0.weights"], reply.layers[0].weights)
    costs = ModelCosts(model)
    plain = ModelWeightsRequest(text=TEXT)
    assert costs.memory.needed_bytes(check_request(model, request), request) > costs.memory.needed_bytes(
        check_request(model, plain), plain
    )


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"text": "<image> what"}, "text"),
        ({"text": "<image> <image> what", "images": [sent(noise())]}, "images"),
        ({"text": ["what", "is"], "images": [sent(noise())]}, "images"),
        ({"text": TEXT, "images": [sent(png(noise())[:200])]}, "images.0"),
        ({"text": TEXT, "layers": ["vision.0"], "return": ["weights"]}, "layers.0"),
        ({"text": TEXT, "images": [sent(noise())], "layers": ["vision.7"], "return": ["weights"]}, "layers.0"),
        ({"tokens": [5, 6], "images": [sent(noise())]}, "tokens"),
        ({"text": TEXT, "images": [sent(noise())], "target": "mat"}, "images"),
        ({"text": "mat " * 600, "images": [sent(noise())]}, "text"),
    ],
)
def test_what_does_not_fit_together_is_named(request_, param):
    with pytest.raises(InvalidRequest) as fault:
        forward_reply(loaded("llava"), ModelForwardRequest(**request_))
    assert fault.value.param == param


@pytest.mark.parametrize("images", [[], [sent(noise())]])
def test_the_place_of_a_sound_is_none_of_an_image(images):
    parts = [{"type": "audio"}, {"type": "text", "text": "what"}]
    fields = {"messages": [{"role": "user", "content": parts}], "images": images}
    with pytest.raises(InvalidRequest, match="audio: this model hears none") as fault:
        forward_reply(loaded("llava"), ModelForwardRequest.model_validate(fields))
    assert fault.value.param == "messages"


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_place_for_an_image_that_did_not_come_is_refused(kind):
    """The place is the mark that the chat template writes, also where the processor puts another token there."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TEXT}]}]
    with pytest.raises(InvalidRequest, match="no image was sent"):
        forward_reply(loaded(kind), ModelForwardRequest(messages=messages))


def test_sources_of_an_answer_are_parts_of_a_text():
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{sent(noise())['base64']}"}}
    request = ContextRequest(messages=[{"role": "user", "content": [part, {"type": "text", "text": "what"}]}])
    with pytest.raises(InvalidRequest, match="leave images and sounds out") as fault:
        plan_context(loaded("llava"), request)
    assert fault.value.param == "messages"


def test_images_side_by_side_are_refused_where_the_model_cannot_tell_them_apart():
    with pytest.raises(InvalidRequest) as fault:
        forward_reply(
            loaded("qwen2_5_vl"), ModelForwardRequest(text="<image> <image> what", images=[sent(noise())] * 2)
        )
    assert fault.value.param == "text"


def test_tokens_with_their_places_for_images_are_read_as_they_are():
    model, image = loaded("qwen3_vl"), sent(noise(*SIZE))
    prompted = forward_reply(model, ModelForwardRequest(text=TEXT, images=[image], return_=["logits"]))
    reply = forward_reply(model, ModelForwardRequest(tokens=prompted.labels.ids, images=[image], return_=["logits"]))
    near(reply.logits, prompted.logits)
    assert reply.labels.patches == prompted.labels.patches


def test_a_model_whose_images_cannot_be_read_reads_text_and_says_why():
    made = copy.copy(processor("gemma3"))
    made.full_image_sequence = "<boi> <image> <eoi>"  # one place, and four patches
    model = LoadedModel("gemma3", eager("gemma3"), tokenizer(), Device.open("cpu"), made)
    near(
        forward_reply(model, ModelForwardRequest(text=TEXT, return_=["logits"])).logits,
        forward_reply(loaded("gemma3"), ModelForwardRequest(text=TEXT, return_=["logits"])).logits,
    )
    assert "images" not in model_info(model)["takes"]
    with pytest.raises(InvalidRequest, match="cannot be read here") as fault:
        forward_reply(model, ModelForwardRequest(text=TEXT, images=[sent(noise())]))
    assert fault.value.param == "images"
    model.close()
