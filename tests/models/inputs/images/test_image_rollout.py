"""The rollout of the layers that see an image is the float64 product of the eager model's weights, patch by patch."""

import numpy as np
import pytest
import torch
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.inputs.images.small_prompts import PROMPTS, eager, loaded, processor, tokenizer
from tests.models.inputs.images.test_prompts import SIZE, TEXT, prompt
from tools.models_walk.eager_runs import eager_weights

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.rollout import RecordingRolloutRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.inputs.images.prompt_inputs import PromptInputs
from attention_service.models.inputs.media_prompts import unlike_windows
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.rollout import prepare_recorded

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # of PaliGemma's processor
LAYERS = ["vision.0", "vision.1"]


def eager_layers(kind, images, crops, tokens):
    """Return the weights ``[H, N, N]`` of each layer over all crops, whatever windows or crops eager attention ran."""
    arguments = prompt(kind, *images)
    seen = [each for each in eager_weights(eager(kind), arguments) if each.shape[-1] != arguments["input_ids"].shape[1]]
    if "qwen" not in kind:  # one call a layer, whose batch are the crops
        calls = []
        with torch.no_grad():
            model = eager(kind)
            hooks = [
                module.register_forward_hook(lambda _, __, output: calls.append(output[1]))
                for name, module in model.named_modules()
                if name.endswith(("self_attn", ".attention")) and ("vision" in name) and "head" not in name
            ]
            model(**arguments)
            for hook in hooks:
                hook.remove()
        seen = [crop for layer in calls for crop in layer.double().numpy()]
    layers, at = [], 0
    for _ in LAYERS:
        heads = seen[at].shape[0]
        whole, start = np.zeros((heads, crops * tokens, crops * tokens)), 0
        while start < crops * tokens:
            stop = start + seen[at].shape[-1]
            whole[:, start:stop, start:stop], start, at = seen[at], stop, at + 1
        layers.append(whole)
    assert at == len(seen)
    return layers


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_rollout_of_vision_layers_is_the_product_of_eager_weights(kind, tmp_path):
    images = [noise(*SIZE), noise(40, 40)]
    model = loaded(kind)
    found = recorded_weights(
        model, ModelWeightsRequest(text=TEXT, images=[sent(each) for each in images], keep=True, return_weights=False)
    )
    reply, store = found.reply, RecordingStore(tmp_path, 2**30)
    recording = store.add(found.recording)
    request = RecordingRolloutRequest(layers=LAYERS)
    job = prepare_recorded(store, recording.id, request, None, Device.open("cpu"))
    fields = job.bound.results(torch.device("cpu"))
    labels = [token for crop in reply.image_labels for token in crop.tokens]
    assert fields["tokens"] == labels
    crops = len(reply.image_labels)
    expected = np.eye(len(labels))
    for weights in eager_layers(kind, images, crops, len(labels) // crops):
        mean = weights.astype(np.float64).mean(0)
        expected = (0.5 * np.eye(len(labels)) + 0.5 * mean / mean.sum(-1, keepdims=True)) @ expected
    np.testing.assert_allclose(fields["values"], expected, atol=1e-6)
    ends = [at for at, each in enumerate(labels) if each.startswith("[1:")]
    assert not fields["values"][np.ix_(range(ends[0] - 1), ends)].any() or "qwen" not in kind
    text = prepare_recorded(store, recording.id, RecordingRolloutRequest(), None, Device.open("cpu"))
    assert text.bound.about["layers"] == ["layers.0", "layers.1"]


def test_a_recording_has_the_states_and_taps_of_every_crop():
    model = loaded("smolvlm")
    image = sent(noise(*SIZE))
    request = ModelForwardRequest(text=TEXT, images=[image], keep=True, return_=["q", "masked_scores", "hidden"])
    found = recorded_forward(model, request)
    reply, held = found.reply, found.recording
    crops, length = len(reply.image_labels), len(reply.image_labels[0].tokens)
    vision = next(each for each in reply.layers if each.layer == "vision.1")
    assert held.vision["1.hidden"].shape == (crops * length, 32)
    for crop in range(crops):
        place = slice(crop * length, (crop + 1) * length)
        np.testing.assert_array_equal(held.vision["1.q"][:, place], vision.q[crop])
        np.testing.assert_array_equal(held.vision["1.hidden"][place], vision.hidden[crop])
        np.testing.assert_array_equal(held.vision["1.masked_scores"][:, place, place], vision.masked_scores[crop])
    assert np.isneginf(held.vision["1.masked_scores"][:, :length, length:]).all()
    assert held.vision["0.weights"].sum(-1) == pytest.approx(1, abs=1e-5)
    words = recorded_forward(model, ModelForwardRequest(text=TEXT, images=[image], keep=True, layers=[0]))
    assert words.reply.labels.tokens == words.recording.tokens["layers"]
    assert not words.recording.vision


def test_layers_whose_windows_have_no_tokens_in_common_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(PromptInputs, "find_parts", lambda self, places, *_: unlike_windows(places, -1))
    model = LoadedModel("llava", eager("llava"), tokenizer(), Device.open("cpu"), processor("llava"))
    image = sent(noise(*SIZE))
    assert [each.layer for each in weights_reply(model, ModelWeightsRequest(text=TEXT, images=[image])).layers] == [
        0,
        1,
    ]
    with pytest.raises(InvalidRequest, match="cannot be multiplied") as fault:
        weights_reply(model, ModelWeightsRequest(text=TEXT, images=[image], layers=["vision.0"]))
    assert fault.value.param == "layers.0"
    model.close()
