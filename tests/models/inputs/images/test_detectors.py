"""Detectors: weights from objects to places of the feature map are those of transformers, and so are the classes."""

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import live_server
from tests.cost.peaks import peaks
from tests.models.inputs.images import small_detectors as small
from tests.models.inputs.images.small_encoders import ENCODERS, marked, noise, processor, sent, sharp
from transformers import CONFIG_MAPPING
from transformers.models.detr import modeling_detr

from attention_client import Client
from attention_contract.errors import InvalidCheckpoint, InvalidRequest
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

IMAGE, TALL = noise(96, 64), noise(50, 90)[::-1].copy()
EXACT = 1e-6


def error(found, expected):
    """The largest difference, as a share of the largest number that is expected."""
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    assert a.shape == b.shape
    return abs(a - b).max() / abs(b).max()


def apart(found, expected):
    """The largest difference of weights."""
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    assert a.shape == b.shape
    return abs(a - b).max()


def forward(kind, images, **fields):
    return forward_reply(small.loaded(kind), ModelForwardRequest(images=[sent(each) for each in images], **fields))


def stacks(output):
    """The weights of each attention that transformers returns, by the key of its layer."""
    named = {
        "encoder": output.encoder_attentions, "decoder": output.decoder_attentions, "cross": output.cross_attentions
    }  # fmt: skip
    return {f"{stack}.{number}": each for stack, layers in named.items() for number, each in enumerate(layers or ())}


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", small.CROSSES)
def test_weights_states_and_classes_are_those_of_the_eager_model(kind):
    reply = forward(kind, [IMAGE], return_=["weights", "hidden", "logits"])
    expected = small.reference(kind, [IMAGE])
    own = stacks(expected)
    assert [layer.layer for layer in reply.layers] == [
        "encoder.0", "encoder.1", "decoder.0", "cross.0", "decoder.1", "cross.1",
    ]  # fmt: skip
    for layer in reply.layers:
        assert apart(layer.weights, own[layer.layer][0]) < EXACT
    assert error(reply.logits, expected.logits[0]) < EXACT
    if kind == "detr":  # others norm what the last layer returns
        (last,) = [layer.hidden for layer in reply.layers if layer.layer == "encoder.1"]
        assert error(last, expected.encoder_last_hidden_state[0]) < 2 * EXACT
    objects, places = reply.tokens_of("cross.0")
    assert objects.tokens == [f"object {number}" for number in range(small.QUERIES)]
    assert (places.tokens[0], places.tokens[-1]) == ("[0,0]", "[7,11]")
    assert places.rectangles[13] == pytest.approx((8, 8, 16, 16), abs=0.3)
    assert reply.tokens_of("decoder.1") == (objects, objects)
    assert reply.tokens_of("encoder.1") == (places, places)


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", small.DETECTORS)
def test_each_object_has_a_class_as_the_checkpoints_processor_reads_it(kind):
    reply = forward(kind, [IMAGE])
    logits = small.reference(kind, [IMAGE]).logits[0]
    shares = logits.softmax(-1) if logits.shape[-1] == 4 else logits.sigmoid()
    names = ["LABEL_0", "LABEL_1", "LABEL_2", "no object"]
    assert [each.position for each in reply.predictions] == [*range(small.QUERIES)]
    for each, row in zip(reply.predictions, shares, strict=True):
        assert [top.token for top in each.top] == [names[at] for at in row.argsort(descending=True)[:5]]
        np.testing.assert_allclose([top.probability for top in each.top], row.sort(descending=True)[0][:5], atol=EXACT)
    assert model_info(small.loaded(kind))["classes"] == names[: logits.shape[-1]]


def test_what_a_padded_image_has_not_is_hidden_as_the_model_hides_it():
    reply = forward("detr", [IMAGE, TALL], return_=["weights", "logits"])
    expected = small.reference("detr", [IMAGE, TALL])
    for layer in reply.layers:
        assert apart(layer.weights, stacks(expected)[layer.layer]) < EXACT
    assert error(reply.logits, expected.logits) < EXACT
    pixels = small.processor()(images=[IMAGE, TALL], return_tensors="pt")["pixel_mask"]
    real = torch.nn.functional.interpolate(pixels[None].float(), size=(15, 12))[0].bool().flatten(1).numpy()
    for number, labels in enumerate(reply.encoder_labels):
        shown = np.array([each is not None for each in labels.rectangles])
        assert labels.patches[0] == (number, 0, 0)
        assert 0 < shown.sum() < len(shown)
        assert real[number, shown].all()
        assert not reply.layers[3].weights[number][..., ~real[number]].any()
    statistics = weights_reply(
        small.loaded("detr"), ModelWeightsRequest(images=[sent(IMAGE), sent(TALL)], statistics=["entropy"])
    )
    entropy = -(torch.special.xlogy(own := stacks(expected)["encoder.0"].double(), own)).sum(-1)
    means = [np.asarray(rows)[:, mask].mean(-1) for rows, mask in zip(entropy, real, strict=True)]
    np.testing.assert_allclose(statistics.layers[0].statistics.entropy, means, atol=1e-5)


def test_a_changed_square_changes_the_place_whose_label_it_is_the_most():
    plain = forward("detr", [IMAGE], return_=["hidden"])
    places = plain.encoder_labels
    for at in (0, 17, len(places.tokens) - 1):
        found = forward("detr", [marked(IMAGE, places.rectangles[at])], return_=["hidden"])
        change = abs(found.entered - plain.entered).max(-1)
        row, column = np.divmod(int(change.argmax()), 12)
        assert max(abs(row - places.patches[at][1]), abs(column - places.patches[at][2])) <= 1


def test_edited_cross_weights_change_the_classes_as_in_plain_torch():
    edits = {"cross.1": [{"tap": "weights", "heads": [2], "keys": [7, 8], "set": 0}]}
    found = forward("detr", [IMAGE], edits=edits, compare="unedited", return_=["logits"])
    own = modeling_detr.eager_attention_forward
    module = small.eager("detr").model.decoder.layers[1].encoder_attn

    def edited(self, query, key, value, mask, **options):
        output, weights = own(self, query, key, value, mask, **options)
        if self is not module:
            return output, weights
        weights = weights.clone()
        weights[:, 2, :, 7:9] = 0
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with patch.object(modeling_detr, "eager_attention_forward", edited):
        expected = small.reference("detr", [IMAGE])
    assert error(found.logits, expected.logits[0]) < EXACT
    assert error(found.logits, small.reference("detr", [IMAGE]).logits[0]) > 1e-4
    assert max(each.divergence for each in found.predictions) > 0


@pytest.mark.parametrize("kind", ["detr", "rt_detr"])
def test_gradients_of_a_class_of_an_object_are_those_of_the_eager_model(kind):
    of = {"token": "LABEL_1", "position": 3}
    request = ModelGradientsRequest(
        images=[sent(IMAGE)], of=of, wrt=["tokens", "embeddings"], check=kind == "detr", by_head=False
    )
    reply = ModelGradients(small.loaded(kind), request).reply()
    model, held = small.eager(kind), []
    first = model.model.encoder.layers[0] if kind == "detr" else model.model.encoder.aifi[0].layers[0]

    def hold(_, args, options):
        held.append((args[0] if args else options["hidden_states"]).detach().requires_grad_())
        return (held[0], *args[1:]), options

    hook = first.register_forward_pre_hook(hold, with_kwargs=True)
    logits = model(**small.processor()(images=[IMAGE], return_tensors="pt")).logits[0, 3]
    hook.remove()
    value = (logits.log_softmax(-1) if kind == "detr" else torch.nn.functional.logsigmoid(logits))[1]
    (expected,) = torch.autograd.grad(value, held)
    assert error(reply.embeddings, expected[0]) < 1e-5
    assert reply.tokens.shape == (len(reply.encoder_labels.tokens),)
    if kind == "detr":  # sampled points have no smooth gradient along every direction
        assert all(each.passed for each in reply.check.values())


def test_without_a_position_the_likeliest_object_of_a_class_is_differentiated():
    logs = small.reference("detr", [IMAGE]).logits[0].log_softmax(-1)

    def value(**of):
        request = validate(ModelGradientsRequest, {"images": [sent(IMAGE)], **({"of": of} if of else {})})
        return float(ModelGradients(small.loaded("detr"), request).reply().value)

    assert value(token="LABEL_2") == pytest.approx(float(logs[:, 2].max()), abs=1e-5)
    assert value() == pytest.approx(float(logs[:, :-1].max()), abs=1e-5)


def test_a_detector_with_sampled_points_has_the_weights_of_its_other_layers():
    reply = forward("rt_detr", [IMAGE], return_=["weights", "logits"])
    expected = small.reference("rt_detr", [IMAGE])
    assert [layer.layer for layer in reply.layers] == ["encoder.0", "decoder.0", "decoder.1"]
    for layer in reply.layers:
        assert apart(layer.weights, stacks(expected)[layer.layer][0]) < EXACT
    assert error(reply.logits, expected.logits[0]) < EXACT
    assert reply.encoder_labels.tokens[-1] == "[1,2]"
    assert model_info(small.loaded("rt_detr"))["unseen"] == ["RTDetrMultiscaleDeformableAttention"]


def test_a_detector_all_of_whose_places_are_sampled_is_refused_by_name():
    own = {"backbone_config": small.LEVELS, "num_feature_levels": 3}
    config = CONFIG_MAPPING["deformable_detr"](**small.SIZES | own)
    model = sharp(transformers.DeformableDetrForObjectDetection, config)
    with pytest.raises(InvalidCheckpoint, match="samples between places, which are no tokens"):
        LoadedModel("deformable", model, None, Device.open("cpu"), small.processor())


def test_the_objects_of_yolos_are_its_last_tokens():
    _, options, _, _ = ENCODERS["yolos"]
    config = CONFIG_MAPPING["yolos"](
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=8, num_labels=3,
        **options,
    )  # fmt: skip
    own = sharp(transformers.YolosForObjectDetection, config)
    made = processor("yolos")(images=[IMAGE], return_tensors="pt")
    with torch.no_grad():
        expected = own(**made, output_attentions=True)
    model = LoadedModel("yolos", own, None, Device.open("cpu"), processor("yolos"))
    reply = forward_reply(model, ModelForwardRequest(images=[sent(IMAGE)], return_=["weights", "logits"]))
    assert apart(reply.layers[1].weights, expected.attentions[1][0]) < EXACT
    assert error(reply.logits, expected.logits[0]) < EXACT
    assert [reply.labels.tokens[each.position] for each in reply.predictions] == [f"object {n}" for n in range(7)]
    third = forward_reply(model, ModelForwardRequest(images=[sent(IMAGE)], positions=[-5], return_=["logits"]))
    assert error(third.logits, expected.logits[0, 2:3]) < EXACT
    request = ModelGradientsRequest(images=[sent(IMAGE)], of={"token": "LABEL_1"}, check=True)
    found = ModelGradients(model, request).reply()
    assert float(found.value) == pytest.approx(float(expected.logits[0].log_softmax(-1)[:, 1].max()), abs=1e-5)
    with pytest.raises(InvalidRequest, match="is a patch") as fault:
        forward_reply(model, ModelForwardRequest(images=[sent(IMAGE)], positions=[3]))
    assert fault.value.param == "positions"


def test_the_memory_of_a_detector_counts_its_backbone():
    wide = {"embedding_size": 32, "hidden_sizes": [128, 8, 8, 8], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
    config = CONFIG_MAPPING["detr"](**small.SIZES | {"backbone_config": small.RESNET | wide})
    model = LoadedModel(
        "detr", sharp(transformers.DetrForObjectDetection, config), None, Device.open("cpu"),
        transformers.DetrImageProcessorPil(size={"shortest_edge": 512, "longest_edge": 512}),
    )  # fmt: skip
    body = {"images": [sent(noise(64, 64))], "statistics": ["entropy"], "return_weights": False}
    request = validate(ModelWeightsRequest, body)
    checked = check_request(model, request)
    needed = ModelCosts(model).memory.needed_bytes(checked, request)
    (held,) = peaks([lambda: weights_reply(model, request, checked)])
    assert 2**24 < held < needed < 5 * held
    model.close()


def test_detectors_over_http(tmp_path):
    small.eager("detr").save_pretrained(tmp_path / "detr")
    small.processor().save_pretrained(tmp_path / "detr")
    assert json.loads((tmp_path / "detr" / "config.json").read_text())["architectures"] == ["DetrForObjectDetection"]
    expected = small.reference("detr", [IMAGE])
    with live_server(tmp_path) as url, Client(url) as client:
        listed = client.models.get("detr")
        reply = client.models.forward("detr", images=[sent(IMAGE)], layers=["cross.1"], return_=["weights", "logits"])
        info = client.models.get("detr")
        assert listed.classes == info.classes == ["LABEL_0", "LABEL_1", "LABEL_2", "no object"]
        assert (info.takes, info.predicts) == (["images"], "class")
        assert apart(reply.layers[0].weights, expected.cross_attentions[1][0]) < EXACT
        assert error(reply.logits, expected.logits[0]) < EXACT
        kept = client.models.weights("detr", images=[sent(IMAGE)], keep=True)
        recording = client.recordings.get(kept.recording)
        assert {each["name"] if isinstance(each, dict) else each.name for each in recording.attentions} >= {
            "encoder.0", "decoder.1", "decoder.1.cross",
        }  # fmt: skip
        cost = client.models.complexity("detr", images=[{"width": 96, "height": 64}])
        assert (cost.images[0].tokens, cost.prefill.flops > 0) == (96, True)
