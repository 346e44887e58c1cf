"""The sounds of a request: their headers are checked against limits before anything is decoded. Nothing is fetched."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import AudioBytes
from attention_service.core.cancellation import checkpoint
from attention_service.models.inputs.file_bytes import file_of

FORMATS: Final = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
"""The formats that are read, by libsndfile's names."""
MAX_SAMPLES: Final = 2**26
"""Samples of all sounds of a request: of all their channels, and at the rate of the model."""
_BYTES: Final = 96
"""Bytes that a sample at the model's rate takes until it is a feature: the windows of a spectrogram overlap."""
_BYTES_READ: Final = 8
"""Bytes that each sample of a file takes: as one channel, and as what is resampled."""
_BLOCK: Final = 2**16
"""Samples of each channel that are decoded at a time."""
_CHANNELS: Final = 64


class Sound(NamedTuple):
    """One decoded sound."""

    samples: NDArray[np.float32]
    """``[samples]``: one channel at the rate of the model."""
    seconds: float


def sound_bytes(audio: Sequence[AudioBytes], rate: int) -> int:
    """Estimate the memory that the sounds of a request take until they are features.

    ``rate``: samples a second of the model. Raises InvalidRequest for what is no sound, and for sounds too long.
    """
    return _bytes_of(_opened(audio), rate)


def decoded(audio: Sequence[AudioBytes], rate: int) -> list[Sound]:
    """Decode sounds as the mean of their channels, at this rate. Raises InvalidRequest."""
    opened = _opened(audio)
    _bytes_of(opened, rate)
    return [_decoded(file, rate, f"audio.{index}") for index, file in enumerate(opened)]


def _opened(audio: Sequence[AudioBytes]) -> list[Any]:
    """Read the headers alone."""
    import soundfile  # noqa: PLC0415 -- of the extra sound, without which no model that hears is loaded

    found = []
    for index, each in enumerate(audio):
        param = f"audio.{index}"
        content = file_of(each.base64, param)
        try:
            file = soundfile.SoundFile(content)
        except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError):
            file = None
        if file is None or file.format not in FORMATS:
            raise InvalidRequest.at(param, "expected a file of WAV, FLAC, OGG or MP3")
        if not 0 < file.channels <= _CHANNELS or file.samplerate <= 0:
            raise InvalidRequest.at(param, f"it has {file.channels} channels at {file.samplerate} Hz; expected one")
        if file.frames <= 0:
            raise InvalidRequest.at(param, "it has no samples")
        found.append(file)
    return found


def _bytes_of(files: Sequence[Any], rate: int) -> int:
    read = made = 0
    for index, file in enumerate(files):
        read += file.frames * file.channels
        made += -(-file.frames * rate // file.samplerate)
        if max(read, made) > MAX_SAMPLES:
            raise InvalidRequest.at(
                f"audio.{index}",
                f"{file.frames} samples of {file.channels} channels at {file.samplerate} Hz; the sounds of a request "
                f"may have {MAX_SAMPLES} in all, and at {rate} Hz as well. Send shorter ones",
                limit=MAX_SAMPLES,
            )
    return int(_BYTES_READ * sum(file.frames for file in files) + _BYTES * made)


def _decoded(file: Any, rate: int, param: str) -> Sound:
    mono, at = np.empty(file.frames, np.float32), 0
    while at < len(mono):
        checkpoint()
        try:
            block = file.read(min(_BLOCK, len(mono) - at), dtype="float32", always_2d=True)
        except RuntimeError as fault:  # that of soundfile is one
            raise InvalidRequest.at(param, f"the file is broken: {str(fault)[:80]}") from None
        if not len(block):
            break
        mono[at : at + len(block)] = block.mean(1)
        at += len(block)
    mono = mono[:at]
    if not at:
        raise InvalidRequest.at(param, "the file is broken: it ends before its first sample")
    if not bool(np.isfinite(mono).all()):
        raise InvalidRequest.at(param, "the file has samples that are NaN or infinite")
    return Sound(resampled(mono, file.samplerate, rate), at / file.samplerate)


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Samples at another rate, by a filter with linear phase. Source: the SoX resampler, quality HQ."""
    if rate == wanted:
        return samples
    import soxr  # noqa: PLC0415 -- of the extra sound

    made: NDArray[np.float32] = soxr.resample(samples, rate, wanted)
    return made
