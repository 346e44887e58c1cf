"""A model that hears gives the numbers of its eager self, and its labels say which seconds each frame is."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.models.inputs.sounds.small_sounds import (
    END,
    ENGLISH,
    HEARS,
    NO_TIMES,
    RATE,
    SECONDS,
    START,
    extractor,
    loaded,
    made,
    sent,
    speech,
)
from tests.models.small_models import near
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of PyTorch, for WavLM


def reference(kind, sound, **arguments):
    """The run of transformers itself."""
    with torch.no_grad():
        return made(kind)[0](**features(kind, sound), **arguments, output_attentions=True, output_hidden_states=True)


def features(kind, sound):
    padding = {"padding": True} if kind in MASKED else {}
    return extractor(kind)(sound, **padding, sampling_rate=RATE, return_tensors="pt")


def test_weights_of_encoder_decoder_and_cross_layers_are_those_of_the_eager_model():
    request = ModelForwardRequest(audio=[sent(speech())], target="the cat", return_=["weights", "hidden", "logits"])
    reply = forward_reply(loaded("whisper"), request)
    expected = reference("whisper", speech(), decoder_input_ids=torch.tensor([reply.labels.ids]))
    eager = {
        "encoder": expected.encoder_attentions, "decoder": expected.decoder_attentions,
        "cross": expected.cross_attentions,
    }  # fmt: skip
    for layer in reply.layers:
        stack, number = layer.layer.split(".")
        near(layer.weights, eager[stack][int(number)][0])
    assert {layer.layer for layer in reply.layers} == {f"{stack}.{number}" for stack in eager for number in range(2)}
    near(reply.logits[-1], expected.logits[0, -1])
    assert reply.labels.ids == [START, NO_TIMES, *reply.labels.ids[2:-1], END]
    assert "".join(reply.labels.tokens[2:-1]) == "the cat"
    frames, queries = reply.tokens_of("cross.1")[1], reply.tokens_of("cross.1")[0]
    assert queries is reply.labels
    assert frames.seconds[:2] == [(0.0, 0.02), (0.02, 0.04)]
    assert frames.seconds[249:251] == [(4.98, 5.0), None]  # the rest of what it hears is silence
    assert frames.tokens[249:251] == ["4.98 s", "5.00 s"]


MASKED = [kind for kind, (*_, settings) in HEARS.items() if settings.get("return_attention_mask")]
STEREO = np.stack([speech(1.5), speech(1.5)], 1)


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", HEARS)
def test_encoders_and_their_heads_give_the_numbers_of_the_eager_model(kind):
    model, decoded = loaded(kind), {}
    if kind == "moonshine":
        decoded = {"decoder_input_ids": torch.tensor([[1]])}
    returns = ["weights", *(["logits"] if model.head.predicts else [])]
    reply = forward_reply(model, ModelForwardRequest(audio=[sent(STEREO)], return_=returns))
    expected = reference(kind, [speech(1.5)], **decoded)
    eager = {
        "": expected.get("attentions"), "encoder": expected.get("encoder_attentions"),
        "decoder": expected.get("decoder_attentions"), "cross": expected.get("cross_attentions"),
    }  # fmt: skip
    for layer in reply.layers:
        stack, _, number = str(layer.layer).rpartition(".")
        own = eager[stack][int(number)][0]
        near(layer.weights if kind != "wavlm" else layer.weights.mean(0, keepdims=True).repeat(4, 0), own)
    frames = reply.tokens_of(reply.layers[0].layer)[1]
    assert len(frames.tokens) == len(frames.seconds) == reply.layers[0].weights.shape[-1]
    if model.head.predicts:
        logits = expected.logits[0]
        near(reply.logits[-1], logits if model.head.predicts == "class" else logits[-1])
    of = {} if model.head.predicts else {"upstream": np.ones((len(frames.tokens), 32), np.float32)}
    gradients = ModelGradients(model, ModelGradientsRequest(audio=[sent(STEREO)], of=of, check=True)).reply()
    assert gradients.tokens.shape == (len(frames.tokens),)
    assert all(each.passed for each in gradients.check.values())


@contextmanager
def every_softmax(change=lambda number, weights: weights):
    """Keep what each softmax of PyTorch's attention function returns, or what ``change`` makes of it."""
    own, kept = nn.functional.softmax, []

    def seen(x, *args, **options):
        kept.append(change(len(kept), own(x, *args, **options)))
        return kept[-1]

    with patch.object(nn.functional, "softmax", seen):
        yield kept


def test_each_head_of_wavlm_has_weights_of_its_own():
    """The model itself returns their mean over heads."""
    sound, model = sent(speech(1.5)), loaded("wavlm")
    assert model_info(model)["attention"] == "observed"
    taps = ["weights", "v", "context", "logits"]
    plain = forward_reply(model, ModelForwardRequest(audio=[sound], return_=taps))
    with every_softmax() as weights:
        reference("wavlm", [speech(1.5)])
    for layer, own in zip(plain.layers, weights, strict=True):
        near(layer.weights, own)
        near(layer.weights @ layer.v, layer.context)
    edits = {"0": [{"tap": "weights", "heads": [1], "scale": 0.5}]}
    edited = forward_reply(model, ModelForwardRequest(audio=[sound], return_=["logits"], edits=edits))

    def halved(number, found):
        heads = torch.tensor([1.0, 1.0 if number else 0.5, 1.0, 1.0])
        return found * heads[:, None, None]

    with every_softmax(halved):
        near(edited.logits[-1], reference("wavlm", [speech(1.5)]).logits[0, -1])
    assert abs(edited.logits - plain.logits).max() > 1e-3


@pytest.mark.sampled(kind=6)
@pytest.mark.parametrize("kind", HEARS)
def test_a_changed_part_of_a_sound_changes_a_token_most_whose_seconds_it_is(kind):
    sound = speech(1.5)

    def embeddings(samples):
        reply = forward_reply(loaded(kind), ModelForwardRequest(audio=[sent(samples)], return_=["hidden"]))
        return reply.entered, reply.tokens_of(reply.layers[0].layer)[1]

    plain, labels = embeddings(sound)
    changed = sound.copy()
    changed[14_000:14_200] *= -1
    change = abs(embeddings(changed)[0] - plain).max(-1)
    change[[at for at, each in enumerate(labels.seconds) if each is None]] = 0
    begin, end = labels.seconds[int(change.argmax())]
    # What convolutions spread, of positions or of frames that are eight features long.
    reach = {"audio-spectrogram-transformer": 0.0, "parakeet": 0.2, "lasr_encoder": 0.2}.get(kind, 0.05)
    assert begin - reach < 14_000 / RATE < end + reach


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", sorted({*MASKED} - {"data2vec-audio", "moonshine"}))
def test_sounds_of_different_lengths_are_one_batch_with_a_mask(kind):
    given = [sent(speech(1.5)), sent(speech(0.7, seed=1))]
    batch = weights_reply(loaded(kind), ModelWeightsRequest(audio=given))
    for number, one in enumerate(given):
        single = weights_reply(loaded(kind), ModelWeightsRequest(audio=[one]))
        ours, theirs = batch.layers[0], single.layers[0]
        count = theirs.weights.shape[-1]
        near(ours.weights[number][:, :count, :count], theirs.weights, 1e-4)
        near(ours.statistics.entropy[number], theirs.statistics.entropy, 1e-4)


@pytest.mark.parametrize("kind", ["wav2vec2-base", "data2vec-audio", "moonshine"])
def test_a_model_whose_numbers_would_change_takes_sounds_of_one_length(kind):
    model, pair = loaded(kind), [sent(speech(1.0)), sent(speech(1.0, seed=1))]
    assert weights_reply(model, ModelWeightsRequest(audio=pair)).layers[0].weights.shape[0] == 2
    with pytest.raises(InvalidRequest, match="different lengths") as fault:
        weights_reply(model, ModelWeightsRequest(audio=[*pair, sent(speech(0.5))]))
    assert fault.value.param == "audio"
    with pytest.raises(InvalidRequest, match="too short") as fault:
        weights_reply(model, ModelWeightsRequest(audio=[sent(speech(0.01))]))
    assert fault.value.param == "audio.0"


def test_patches_of_a_spectrogram_have_rows_of_frequencies():
    labels = weights_reply(
        loaded("audio-spectrogram-transformer"), ModelWeightsRequest(audio=[sent(speech(1.0))])
    ).labels
    assert labels.tokens[:3] == ["CLS", "distillation", "0.00 s/0"]
    assert labels.tokens[2 + 33] == "0.00 s/1"  # 33 patches of 8 frames in 200, each 6 behind the last
    assert labels.seconds[:4] == [None, None, (0.0, 0.08), (0.06, 0.14)]
    assert labels.seconds[2 + 17] is None  # from 1.02 s on


def test_the_last_frame_ends_with_the_sound():
    sound = speech(0.35)[: int(0.333 * RATE)]
    seconds = weights_reply(loaded("whisper"), ModelWeightsRequest(audio=[sent(sound)])).encoder_labels.seconds
    assert seconds[16] == (0.32, 0.333)
    assert seconds[17] is None


@pytest.mark.parametrize("frame", [3, 120, 240])
def test_a_changed_part_of_a_sound_changes_the_frame_whose_seconds_it_is_most(frame):
    sound = speech()

    def embeddings(samples):
        reply = forward_reply(loaded("whisper"), ModelForwardRequest(audio=[sent(samples)], return_=["hidden"]))
        return reply.entered, reply.encoder_labels

    plain, labels = embeddings(sound)
    begin, end = (round(edge * RATE) for edge in labels.seconds[frame])
    changed = sound.copy()
    changed[begin:end] += np.random.default_rng(0).normal(0, 0.01, end - begin).astype(np.float32)
    change = abs(embeddings(changed)[0] - plain).max(-1)
    assert abs(int(change.argmax()) - frame) <= 1


def test_a_target_may_bring_the_tokens_of_language_and_task():
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> the"
    labels = forward_reply(loaded("whisper"), ModelForwardRequest(audio=[sent(speech())], target=text)).labels
    assert labels.ids[:2] == [START, ENGLISH]
    assert labels.tokens == ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", *" the"]


def test_several_sounds_are_one_batch():
    given = [sent(speech()), sent(speech(2.0, seed=1))]
    batch = weights_reply(loaded("whisper"), ModelWeightsRequest(audio=given, target="the"))
    for number, one in enumerate(given):
        single = weights_reply(loaded("whisper"), ModelWeightsRequest(audio=[one], target="the"))
        for ours, theirs in zip(batch.layers, single.layers, strict=True):
            near(ours.weights[number], theirs.weights)
        assert batch.encoder_labels[number].seconds == single.encoder_labels.seconds


@pytest.mark.slow
def test_gradients_by_frame_are_those_of_the_eager_model():
    sound, token = speech(), 70
    request = ModelGradientsRequest(
        audio=[sent(sound)], of={"token": token}, wrt=["tokens", "embeddings", "weights"], check=True
    )
    reply = ModelGradients(loaded("whisper"), request).reply()
    model, held = made("whisper")[0], []
    hook = model.model.encoder.layers[0].register_forward_pre_hook(
        lambda _, given: (held.append(given[0].detach().requires_grad_()), (held[0], *given[1:]))[1]
    )
    value = model(**features("whisper", sound), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
    hook.remove()
    (expected,) = torch.autograd.grad(value.log_softmax(-1)[token], held)
    near(reply.embeddings, expected[0], 1e-4)
    near(reply.tokens, (expected[0] * held[0][0]).sum(-1).detach(), 1e-4)
    assert len(reply.tokens) == len(reply.encoder_labels.seconds)
    assert all(each.passed for each in reply.check.values())


def test_edits_statistics_recordings_and_costs():
    model = loaded("whisper")
    request = ModelForwardRequest(
        audio=[sent(speech())], target="the", compare="unedited",
        edits={"cross.0": [{"tap": "weights", "heads": [1], "keys": [*range(100)], "set": 0}]},
    )  # fmt: skip
    assert forward_reply(model, request).predictions[0].divergence > 0
    costs = ModelCosts(model)
    checked = check_request(model, request)
    assert costs.memory.needed_bytes(checked, request) > 4 * 4 * checked.inputs.text.length**2  # scores of the encoder
    recording = recorded_weights(model, ModelWeightsRequest(audio=[sent(speech())], target="the", keep=True)).recording
    assert len(recording.tokens["encoder"]) == 50 * SECONDS


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        ({"text": "the cat"}, "text", "reads only sound"),
        ({"text": "the cat", "audio": [sent(speech(0.1))]}, "text", "reads only sound"),
        ({"tokens": [1]}, "tokens", "reads only sound"),
        ({"audio": [sent(speech(SECONDS + 1))]}, "audio.0", "7.00 s; the model hears 6 s at a time"),
        ({"audio": [sent(speech(0.1))], "layers": ["cross.9"], "return": ["weights"]}, "layers.0", "cross.9"),
        ({"audio": [sent(speech(0.1))], "target": "x" * 80}, "target", "positions for 64"),
    ],
)
def test_what_a_model_that_hears_does_not_take_is_named(request_, param, words):
    with pytest.raises(InvalidRequest, match=words) as fault:
        forward_reply(loaded("whisper"), ModelForwardRequest(**request_))
    assert fault.value.param == param


@pytest.mark.parametrize("kind", ["qwen2_audio_encoder", "audioflamingo3_encoder"])
def test_an_encoder_that_pools_its_frames_is_refused_alone(kind, tmp_path):
    options = {
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_source_positions": 50 * SECONDS,
    }
    AutoModel.from_config(CONFIG_MAPPING[kind](**options)).save_pretrained(tmp_path)
    extractor("whisper").save_pretrained(tmp_path)
    with pytest.raises(InvalidCheckpoint, match="load the model whose encoder it is"):
        LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
