"""The sounds of a request: their headers are checked against limits before anything is decoded. Nothing is fetched."""

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
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
_SAMPLE_BYTES: Final = 96
"""Bytes that a sample at the model's rate takes until it is a feature: the windows of a spectrogram overlap."""
_BYTES_READ: Final = 8
"""Bytes that each sample of a file takes: as one channel, and as what is resampled."""
_BLOCK: Final = 2**16
"""Samples of each channel that are decoded at a time."""
_CHANNELS: Final = 64
_UNKNOWN: Final = 2**63 - 1
"""The samples that libsndfile has of a FLAC file whose header leaves them open, as of one that was streamed."""
_FRAME: Final = re.compile(rb"\xff[\xe0-\xff]|ID3")
"""The beginning of a frame of MP3, or of a further file behind the first. libsndfile guesses the length of a file
without a Xing header by the size of its first frame, and reads no more."""
_SAMPLES_A_BYTE: Final = 2**16
"""More samples of a channel than a byte of any format stands for: FLAC has at most 65,535 in a frame."""


class _SoundFile(NamedTuple):
    """An opened file, of which nothing is decoded."""

    file: Any
    """A ``SoundFile`` that is read from its beginning to its end."""
    content: BytesIO
    samples: int
    """Samples of each channel, by the header; counted if that leaves them open."""


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


def _opened(audio: Sequence[AudioBytes]) -> list[_SoundFile]:
    """Read the headers alone, and count the samples of a file whose header leaves them open."""
    opened = []
    for index, encoded in enumerate(audio):
        param = f"audio.{index}"
        content = file_of(encoded.base64, param)
        file = _open(content, param)
        samples = file.frames
        if samples == _UNKNOWN:
            samples = _count(file, param)
            file = _open(content, param)
        if samples <= 0:
            raise InvalidRequest.at(param, "its header says that it has no samples")
        size = len(content.getbuffer())
        if samples > size * _SAMPLES_A_BYTE:
            raise InvalidRequest.at(
                param, f"the file is broken: its header says {samples} samples, more than its {size} bytes can hold"
            )
        opened.append(_SoundFile(file, content, samples))
    return opened


def _open(content: BytesIO, param: str) -> Any:
    """Open a file to be read from its beginning to its end. Raises InvalidRequest for one of another format."""
    import soundfile  # noqa: PLC0415 -- of the extra sound, without which no model that hears is loaded

    content.seek(0)
    try:
        file = soundfile.SoundFile(content)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError):
        file = None
    if file is None or file.format not in FORMATS:
        raise InvalidRequest.at(param, "expected a file of WAV, FLAC, OGG or MP3")
    if not 0 < file.channels <= _CHANNELS or file.samplerate <= 0:
        raise InvalidRequest.at(param, f"it has {file.channels} channels at {file.samplerate} Hz; expected one")
    # It seeks to the end of each block that it has read, which it cannot without a length.
    file.seekable = lambda: False
    return file


def _count(file: Any, param: str) -> int:
    """Count the samples of each channel, at most those of a request and one block. Raises InvalidRequest."""
    samples = 0
    for block in _blocks(file, param):
        samples += len(block)
        if samples * file.channels > MAX_SAMPLES:
            break
    if not samples:
        raise _ended(param)
    return samples


def _blocks(file: Any, param: str) -> Iterator[NDArray[np.float32]]:
    """Decode a file block by block, ``[samples, channels]``. Raises InvalidRequest."""
    while True:
        checkpoint()
        try:
            block = file.read(_BLOCK, dtype="float32", always_2d=True)
        except RuntimeError as fault:  # that of soundfile is one
            raise InvalidRequest.at(param, f"the file is broken: {str(fault)[:80]}") from None
        if not len(block):
            return
        yield block


def _bytes_of(files: Sequence[_SoundFile], rate: int) -> int:
    read = made = 0
    for index, (file, _, samples) in enumerate(files):
        read += samples * file.channels
        made += -(-samples * rate // file.samplerate)
        if max(read, made) > MAX_SAMPLES:
            raise InvalidRequest.at(
                f"audio.{index}",
                f"{'at least ' if file.frames == _UNKNOWN else ''}{samples} samples of {file.channels} channels at "
                f"{file.samplerate} Hz; the sounds of a request may have {MAX_SAMPLES} in all, and at {rate} Hz as "
                "well. Send shorter ones",
                limit=MAX_SAMPLES,
            )
    return int(_BYTES_READ * sum(file.samples for file in files) + _SAMPLE_BYTES * made)


def _decoded(sound: _SoundFile, rate: int, param: str) -> Sound:
    file, content, samples = sound
    mono, at = np.empty(samples, np.float32), 0
    for block in _blocks(file, param):
        part = block[: samples - at].mean(1)
        mono[at : at + len(part)] = part
        at += len(part)
    mono = mono[:at]
    if not at:
        raise _ended(param)
    if file.format == "MP3" and _FRAME.match(content.read(3)):
        raise InvalidRequest.at(
            param,
            f"an MP3 with more frames than its first one tells: only {at} samples would be read. Save it as one stream "
            "with a Xing header, or as FLAC or WAV",
        )
    if not bool(np.isfinite(mono).all()):
        raise InvalidRequest.at(param, "the file has samples that are NaN or infinite")
    return Sound(resampled(mono, file.samplerate, rate), at / file.samplerate)


def _ended(param: str) -> InvalidRequest:
    return InvalidRequest.at(param, "the file is broken: it ends before its first sample")


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Samples at another rate, by a filter with linear phase. Source: the SoX resampler, quality HQ."""
    if rate == wanted:
        return samples
    import soxr  # noqa: PLC0415 -- of the extra sound

    made: NDArray[np.float32] = soxr.resample(samples, rate, wanted)
    return made
