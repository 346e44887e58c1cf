"""Heads that follow a sound in time are found by the statistic ``alignment``."""

import math
import shutil

import numpy as np
import pytest
import torch
from tests.client.cli.command_line import invoke
from tests.conftest import live_server
from tests.models.inputs.sounds import small_sound_prompts
from tests.models.inputs.sounds.small_sounds import END, file_of, made, sent, speech, tokenizer, whisper
from transformers import LogitsProcessor

from attention_client import Client, InvalidRequest
from attention_client.survey import SurveyedHead
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.loaded.loaded_model import LoadedModel

FORWARD, BACK, STILL = 2, 1, 0
"""Heads of ``cross.1``."""
PROMPT = 4
"""Tokens before a transcript: its start, language and task, and that it has no times."""
TARGETS = ["the cat sat", "on the mat"]


@torch.no_grad()
def followed(folder):
    """Write a small Whisper whose head 2 of the last cross-attention follows the sound, and head 1 goes back.

    Nothing but positions reaches the queries and keys of that layer: those of frames and tokens are angles from 0 to π.
    """
    model = whisper(folder, alignment_heads=[[1, FORWARD]])
    encoder, decoder = model.model.encoder, model.model.decoder
    encoder.conv1.weight.zero_()
    encoder.conv2.weight.zero_()
    decoder.embed_tokens.weight.zero_()
    layers = [*encoder.layers, *decoder.layers]
    for module in [part for layer in layers for part in (layer.self_attn.out_proj, layer.fc2)]:
        module.weight.zero_()
        module.bias.zero_()
    decoder.layers[0].encoder_attn.out_proj.weight.zero_()
    for positions in (encoder.embed_positions.weight, decoder.embed_positions.weight):
        angles = torch.linspace(0, math.pi, len(positions))
        positions.zero_()
        positions[:, :4] = torch.stack([angles.cos(), -angles.cos(), angles.sin(), -angles.sin()], -1)  # mean 0
    cross, width = decoder.layers[1].encoder_attn, model.config.d_model // 4
    cross.q_proj.weight.zero_()
    cross.k_proj.weight.zero_()
    cross.q_proj.bias.zero_()
    for head, sign in ((FORWARD, 1.0), (BACK, -1.0)):
        for at, (place, size) in enumerate([(0, sign), (2, 1.0)]):
            cross.q_proj.weight[head * width + at, place] = 24 * size
            cross.k_proj.weight[head * width + at, place] = 24
    model.tie_weights()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    followed(root / "follower")
    shutil.copytree(small_sound_prompts.made("audioflamingo3")[1], root / "asker")
    with live_server(root) as url:
        yield url


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    for at in range(len(TARGETS)):
        (folder / f"{at}.wav").write_bytes(file_of(speech(2.0 + at, seed=at)))
    return [str(folder / f"{at}.wav") for at in range(len(TARGETS))]


def test_the_head_that_follows_the_sound_is_the_alignment_head(url, sounds):
    with Client(url) as client:
        survey = client.models.survey("follower", TARGETS, audio=sounds, statistics=["alignment"])
        assert len(survey.heads) == 4 * 6
        first, last = survey.ranked("alignment")[0], survey.ranked("alignment")[-1]
        assert (first, last) == (SurveyedHead("cross.1", FORWARD), SurveyedHead("cross.1", BACK))
        means = survey.means("alignment")
        np.testing.assert_allclose(means[survey.index("cross.1", STILL)], 0, atol=1e-6)
        assert means[survey.index(*first)] > 0.9
        [passage, *_] = client.models.passages(survey, *first, by="alignment", count=1)
        assert passage.text in {0, 1}
        frames = passage.reply.layers[0].weights[0].argmax(-1)
        assert (np.diff(frames) > 0).all()
        words = client.models.transcribe("follower", sounds[0], response_format="verbose_json").words
        ends = [word.end for word in words]
        assert ends == sorted(ends)
    heads = made("whisper")[0].generation_config.alignment_heads  # of a model without any such head
    assert heads != [[1, FORWARD]]


class Says(LogitsProcessor):
    """Have a model say these tokens."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, input_ids, scores):
        scores = scores.clone().fill_(-1e9)
        scores[:, self.ids[input_ids.shape[1] - PROMPT]] = 0
        return scores


@pytest.mark.sampled
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("said", ["café 中! the", "a b"])
def test_words_have_the_times_at_which_their_heads_look(tmp_path, monkeypatch, said, ends):
    """The query at position p looks at frame p · 299 / 63, and chooses the token behind it."""
    followed(tmp_path)
    model = LoadedModel.load(tmp_path, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    ids = tokenizer()(said, add_special_tokens=False)["input_ids"]
    count = len(ids)
    assert count == len(said.encode())  # a token a byte
    model.model.generation_config.max_length = count + ends
    monkeypatch.setattr(Sampling, "processors", lambda _: [Says([*ids, END])])
    fields = {
        "model": "follower", "file": sent(speech(5.0)), "language": "en", "response_format": "verbose_json",
        "timestamp_granularities": ["word"],
    }  # fmt: skip
    request = validate(TranscriptionRequest, fields)
    (whole,) = generate(model, request, plan_transcription(model, request), lambda _: None).last
    assert whole["text"] == said
    assert [each["word"] for each in whole["words"]] == said.split()
    # A token begins halfway between the frames of the two queries before it; the path begins with the sound.
    begins = [0.0, *((PROMPT - 1.5 + at) * 299 / 63 * 0.02 for at in range(1, count)), 0.0]
    begins[-1] = (PROMPT - 1.5 + count) * 299 / 63 * 0.02 if ends else 5.0
    done = 0
    for word in whole["words"]:
        end = done + len(f"{' ' if done else ''}{word['word']}".encode())
        assert word["start"] == pytest.approx(begins[done], abs=0.041)
        assert word["end"] == pytest.approx(begins[end], abs=0.041)
        assert word["end"] > word["start"]
        done = end
    model.close()


def test_the_texts_of_a_model_without_a_decoder_have_the_sounds_in_them(url, sounds):
    sound = small_sound_prompts.MARK
    texts = [f"{sound} what is heard ?", f"what is heard ? {sound} a bell"]
    heard = [sounds[0], file_of(speech(8.0))]
    with Client(url) as client:
        survey = client.models.survey("asker", texts, audio=heard, statistics=["entropy"])
        read = [client.models.weights("asker", text, audio=[each]) for text, each in zip(texts, heard, strict=True)]
        by_layer = [[np.atleast_2d(layer.statistics.entropy) for layer in reply.layers] for reply in read]
        assert {len(rows) for rows in by_layer[1]} == {1, 2}  # windows of the second sound
        expected = [np.concatenate([rows.mean(0) for rows in each]) for each in by_layer]
        np.testing.assert_allclose(survey.of("entropy"), expected, rtol=1e-5)
        passages = client.models.passages(survey, *survey.heads[0], by="entropy", count=2)
    assert sorted(each.text for each in passages) == [0, 1]


def test_each_text_needs_its_sound(url, sounds):
    with Client(url) as client, pytest.raises(InvalidRequest, match="audio: expected a sound for each of 2 texts"):
        client.models.survey("follower", TARGETS, audio=sounds[:1])


def test_a_token_alone_has_no_alignment(url, sounds):
    with Client(url) as client, pytest.raises(InvalidRequest, match=r"attention\.statistics\.0: alignment compares"):
        client.models.transcribe("follower", sounds[0], attention={"statistics": ["alignment"]})


def test_the_command_finds_it(url, sounds, tmp_path):
    path = tmp_path / "transcripts.txt"
    path.write_text("\n".join(TARGETS))
    flags = [part for sound in sounds for part in ("--audio", sound)]
    done = invoke(["--url", url, "heads", "follower", str(path), *flags, "--by", "alignment", "--count", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split()[:2] == ["cross.1", f"H{FORWARD}"], done.stdout
