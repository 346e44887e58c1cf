"""Sounds are refused by their headers before anything is decoded, and what is broken is named."""

import base64
import contextlib
import io
import re
import struct
import threading
import tracemalloc
from functools import partial

import numpy as np
import psutil
import pytest
import soundfile
from tests.models.inputs.sounds.small_sounds import file_of, sent, speech

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import AudioBytes
from attention_service.models.inputs.sounds import sound_decoding
from attention_service.models.inputs.sounds.sound_decoding import MAX_SAMPLES, decoded, resampled, sound_bytes

RATE = 16_000


def sounds(*contents):
    return [AudioBytes(**sent(each)) for each in contents]


def header(samples, rate=RATE, channels=1, size=None):
    """Return a FLAC file that says how many samples it has, and has none. ``size``: bytes of zeros in their place."""
    packed = (rate << 44) | ((channels - 1) << 41) | (15 << 36) | samples
    rest = bytes(16 + (samples >> 16 if size is None else size))  # as many as could hold the samples
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + struct.pack(">HHxxxxxxQ", 4096, 4096, packed) + rest


def streamed_flac(samples):
    """Return a FLAC file whose header leaves the number of its samples open, as a writer to a pipe leaves it."""
    content = bytearray(file_of(samples, form="FLAC", subtype="PCM_16"))
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    return bytes(content)


def streamed_wav(samples, size, whole=None):
    """Return a WAV file whose header has these sizes of its data, and of the whole."""
    content = bytearray(file_of(samples))
    at = content.index(b"data") + 4
    content[at : at + 4] = struct.pack("<I", size)
    content[4:8] = struct.pack("<I", size if whole is None else whole)
    return bytes(content)


def mp3(samples, mode="VARIABLE", tag=b"Xing", frames=None):
    """Return an MP3. ``tag``: its Xing header is called so; ``frames``: their number in it."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="MP3", bitrate_mode=mode, compression_level=0.5)
    content = bytearray(file.getvalue())
    at = re.search(b"Xing|Info", content).start()
    content[at : at + 4] = tag
    if frames is not None:
        content[at + 8 : at + 12] = struct.pack(">I", frames)
    return bytes(content)


@pytest.mark.parametrize(
    ("form", "subtype", "error"),
    [
        ("WAV", "PCM_16", 1e-4), ("WAV", "FLOAT", 0), ("FLAC", "PCM_24", 1e-6), ("OGG", "VORBIS", 0.05),
        ("MP3", "MPEG_LAYER_III", 0.05),
    ],
)  # fmt: skip
def test_every_format_is_decoded_as_one_channel(form, subtype, error):
    samples = speech(1.0, 44_100)
    quiet = np.stack([samples, samples / 2], 1)
    (found,) = decoded(sounds(file_of(quiet, 44_100, form, subtype)), 44_100)
    assert found.seconds == pytest.approx(1.0)
    assert np.sqrt(np.mean((found.samples - 0.75 * samples) ** 2)) <= error + 1e-7


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_at_another_rate_is_the_same_tone(rate):
    tone, expected = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * each) / each) for each in (rate, RATE))
    found = resampled(tone.astype(np.float32), rate, RATE)
    assert len(found) == 2 * RATE
    np.testing.assert_allclose(found[800:-800], expected[800:-800], atol=1e-5)


@pytest.mark.parametrize(
    "content", [header(2**35), header(2**24, channels=8), header(2**20, rate=100)], ids=["long", "wide", "slow"]
)
def test_a_sound_that_would_be_too_large_is_refused_by_its_header(content):
    """Of the last, 10,000 seconds at 100 Hz, it is what the model hears that is large."""
    tracemalloc.start()
    try:
        for read in (sound_bytes, decoded):
            with pytest.raises(InvalidRequest, match=r"audio\.1: .*may have 67108864 in all") as fault:
                read(sounds(file_of(speech(0.1)), content), RATE)
            assert fault.value.param == "audio.1"
            assert fault.value.facts["limit"] == MAX_SAMPLES
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_sounds_are_limited_together():
    half = header(2**25 + 1)
    assert sound_bytes(sounds(half), RATE) > 4 * 2**25
    with pytest.raises(InvalidRequest) as fault:
        sound_bytes(sounds(half, half), RATE)
    assert fault.value.param == "audio.1"


def test_decoding_takes_no_more_than_its_estimate():
    given = sounds(file_of(np.zeros((2_000_000, 2), np.float32), 48_000))
    estimate, process = sound_bytes(given, RATE), psutil.Process()
    before, seen, done = process.memory_info().rss, [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen.append(process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        decoded(given, RATE)
    finally:
        done.set()
        watching.join()
    assert 0 < max(seen) - before < estimate


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no sound at all", "expected a file of WAV"),
        (file_of(speech(0.1))[:30], "expected a file of WAV"),
        (file_of(speech(0.1), form="AIFF"), "expected a file of WAV"),
        (file_of(np.zeros(0, np.float32)), "its header says that it has no samples"),
        (file_of(np.full(400, np.nan, np.float32)), "NaN or infinite"),
        (header(400), "the file is broken"),
        (header(0), "the file is broken"),
        (header(2**36 - 1, size=1000), r"its header says 68719476735 samples, more than its 1042 bytes can hold"),
        (header(2**25, size=100), r"its header says 33554432 samples, more than its 142 bytes can hold"),
        (streamed_flac(speech(1.0))[:-2000], "the file is broken"),
        (streamed_wav(speech(0.1), 0), "its header says that it has no samples"),
        (
            mp3(speech(1.0), frames=2**31 - 1),
            r"its header says \d+ samples, more than its \d+ bytes can hold",
        ),
        (
            mp3(np.concatenate([np.zeros(4 * RATE, np.float32), speech(0.5)]), tag=bytes(4)),
            r"only \d+ samples would be read",
        ),
        (mp3(speech(0.5)) + mp3(speech(0.5)), r"only 8000 samples would be read"),
    ],
    ids=[
        "other", "cut", "AIFF", "empty", "NaN", "header", "open header", "endless", "long", "cut stream", "no data",
        "endless MP3", "untagged MP3", "two MP3s",
    ],  # some files hold the time at which they were made
)  # fmt: skip
def test_what_is_broken_or_of_another_format_is_named(content, words):
    with pytest.raises(InvalidRequest, match=words) as fault:
        decoded(sounds(content), RATE)
    assert fault.value.param == "audio.0"


@pytest.mark.parametrize(
    "made",
    [
        streamed_flac,
        *(partial(streamed_wav, size=size, whole=whole)
          for size in (2**32 - 1, 2**31 - 1, 0x7FFFF000) for whole in (None, 0)),
        partial(file_of, form="RF64"),
    ],
)  # fmt: skip
def test_a_file_that_was_streamed_without_its_length_is_read_to_its_end(made):
    samples = speech(3.0) * 0.5
    (sound,) = decoded(sounds(made(samples)), RATE)
    np.testing.assert_allclose(sound.samples, samples, atol=1e-4)
    assert sound_bytes(sounds(made(samples)), RATE) == sound_bytes(sounds(file_of(samples)), RATE)


def test_the_samples_of_a_stream_are_counted_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(sound_decoding, "MAX_SAMPLES", 2**18)
    counted = []
    monkeypatch.setattr(sound_decoding, "checkpoint", lambda: counted.append(1))
    with pytest.raises(InvalidRequest, match=r"audio\.0: at least 327680 samples of 1 channels .* may have 262144"):
        sound_bytes(sounds(streamed_flac(np.zeros(2**22, np.float32))), RATE)
    assert len(counted) == 5


def test_an_mp3_without_a_header_of_one_bit_rate_is_read_to_its_end():
    samples = speech(3.0)
    content = mp3(samples, "CONSTANT")
    frames = content[content.index(content[:2], 2) :] + b"TAG" + bytes(125)  # with tags of a player behind them
    (sound,) = decoded(sounds(frames), RATE)
    assert len(samples) <= len(sound.samples) <= len(samples) + 4 * 576


def test_base64_is_checked():
    spaced = base64.encodebytes(file_of(speech(0.1))).decode()
    for text in ("§§§§", spaced):
        with pytest.raises(InvalidRequest, match="base64"):
            decoded([AudioBytes(base64=text)], RATE)


@pytest.mark.parametrize(("form", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_random_changes_of_a_file_are_refused_or_decoded(form, subtype):
    rng, content = np.random.default_rng(0), file_of(speech(0.2), RATE, form, subtype)
    for _ in range(60):
        changed = bytearray(content)
        for at in rng.integers(0, len(changed), 4):
            changed[at] = rng.integers(256)
        with contextlib.suppress(InvalidRequest):  # any other error is one of the service
            decoded(sounds(bytes(changed)), RATE)
