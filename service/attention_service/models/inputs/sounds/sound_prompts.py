"""The input of a model that reads text with sounds: the checkpoint's own processor puts them into one prompt."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import ceil
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.prompts import AudioBytes, ModelInput
from attention_service.models.inputs.input_stacks import Inputs, Seconds, Stack, Tokens
from attention_service.models.inputs.media_prompts import MediaPrompts, tokens_of, unlike_windows
from attention_service.models.inputs.sounds.sound_decoding import Sound, decoded
from attention_service.models.inputs.sounds.sound_frames import part_of
from attention_service.models.passes.attention_places import AUDIO, AttentionPlace
from attention_service.models.passes.run_records import RunRecord

_SHORT: Final = 1.0
"""Seconds of the silent sound of a short run."""
_MIN_TOKENS: Final = 2
"""Tokens of a sound: of one alone Qwen2-Audio makes another prompt."""
_CONVOLUTION_COPIES: Final = 4
"""Tensors as wide as a convolution that are in memory at once."""


class SoundPrompts(MediaPrompts):
    """Reads the texts and sounds of one model."""

    medium = "audio"
    media = "audio"
    one = "a sound"
    tower = "audio_config", AUDIO
    senses = "hears sounds"

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's. Raises InvalidCheckpoint for one whose features are not Whisper's."""
        super().__init__(model, processor)
        extractor = processor.feature_extractor
        if not isinstance(extractor, WhisperFeatureExtractor):
            name = type(extractor).__name__
            raise InvalidCheckpoint.at("checkpoint", f"it hears by {name}; sounds in texts need Whisper's")
        self.mark = str(processor.audio_token)
        self.token = int(processor.tokenizer.convert_tokens_to_ids(self.mark))
        self._places = {self.token}
        around = (getattr(processor, name, None) or "" for name in ("audio_bos_token", "audio_eos_token"))
        self.before = self.mark.join(around)
        """A sound before a text."""
        self.names_language = hasattr(processor, "transcription_prompt")
        self.transcribes = self.names_language or hasattr(processor, "apply_transcription_request")
        self.rate = int(extractor.sampling_rate)
        self._wanted["sampling_rate"] = self.rate
        self._window = float(extractor.n_samples) / self.rate
        """The seconds that the layers hear at a time."""
        self.hears_s = most = float(getattr(processor, "max_audio_len", None) or self._window)
        self._most = most
        """Seconds of a sound, beyond which its processor would cut it."""
        whole = self.processed(self.mark, [self._silence(self._window)])
        self._stride = self._window / whole["input_ids"][0].tolist().count(self.token)
        """Seconds of a token."""
        self._length = 0
        """The frames of a window in the layers that hear."""

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a few tokens, and of one over a silent sound."""
        return [*super().short_runs(), self._arguments(self.processed(self.mark, [self._silence(_SHORT)]))]

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the frames of a window, in the layers that hear. See ``InputReader.find_parts``."""
        self._length = places[0].length
        return unlike_windows(places, self._length)

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        sent = request.all_audio
        if not sent:
            return super().read(request)
        self.check_alone(request)
        sounds = self._decoded(sent)
        return self._inputs(sounds, *self.prompt(request, [sound.samples for sound in sounds]))

    def to_transcribe(self, sound: Sound, language: str | None, instruction: str | None) -> Inputs:
        """Read a sound whose text is to be written. ``language``: two letters. Raises InvalidRequest."""
        self._check_lengths([sound])
        samples = sound.samples
        if self.names_language:
            text = self._processor.transcription_prompt(language)
        else:
            try:
                (text,) = self._processor.apply_transcription_request([samples], instruction, tokenize=False)
            except Exception as fault:  # of its chat template
                reason = str(fault).partition("\n")[0][:160]
                raise InvalidRequest.at("audio.0", f"the model's processor writes no request: {reason}") from None
        made = self.processed(text, [samples], add_special_tokens=False)
        return self._inputs([sound], made, tokens_of(made), "audio.0")

    def _decoded(self, sent: Sequence[AudioBytes]) -> list[Sound]:
        """Decode sounds of lengths that the model hears. Raises InvalidRequest."""
        sounds = decoded(sent, self.rate)
        self._check_lengths(sounds)
        return sounds

    def _check_lengths(self, sounds: Sequence[Sound]) -> None:
        """Raise InvalidRequest for a sound that is shorter or longer than the model hears at a time."""
        for index, sound in enumerate(sounds):
            if not _MIN_TOKENS * self._stride <= sound.seconds <= self._most:
                raise InvalidRequest.at(
                    f"audio.{index}",
                    f"{sound.seconds:.2f} s; the model hears {_MIN_TOKENS * self._stride:g} to {self._most:g} s at "
                    "a time",
                    limit=self._most,
                )

    def _inputs(self, sounds: Sequence[Sound], made: dict[str, Any], tokens: Tokens, field: str) -> Inputs:
        """The input of a prompt that the processor made. Raises InvalidRequest that names the field."""
        self.check(tokens.ids, field, sent=True)
        seconds = self._seconds(tokens.ids, sounds, field)
        shown = [None if span is None else f"{span[0]:.2f} s" for span in seconds]
        stack = self.stack(tokens, shown, seconds=[seconds])
        return Inputs(False, stack, None, self._arguments(made), self._heard(sounds))

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory of the convolutions that make frames of features."""
        features = arguments.get("input_features")
        if features is None:
            return 0
        return int(_CONVOLUTION_COPIES * len(features) * features.shape[-1] * features.shape[-2] * features.itemsize)

    def _silence(self, seconds: float) -> Any:
        return np.zeros(round(seconds * self.rate), np.float32)

    def _seconds(self, ids: Sequence[int], sounds: Sequence[Sound], field: str) -> list[Seconds]:
        """The part of a sound that each token of a prompt is; None of a token of the text. Raises InvalidRequest."""
        runs = [[*run] for own, run in groupby(range(len(ids)), lambda at: ids[at] == self.token) if own]
        if len(runs) != len(sounds):
            raise InvalidRequest.at(field, "two sounds follow each other directly; put a text between them")
        spans: list[Seconds] = [None] * len(ids)
        for run, sound in zip(runs, sounds, strict=True):
            for number, at in enumerate(run):
                spans[at] = part_of(number * self._stride, (number + 1) * self._stride, sound.seconds)
        return spans

    def _heard(self, sounds: Sequence[Sound]) -> Stack:
        """The frames of the layers that hear, a row for each window of a sound."""
        frame, length = self._window / self._length, self._length
        windows = [
            (window * self._window, sound.seconds)
            for sound in sounds for window in range(max(1, ceil(round(sound.seconds / self._window, 6))))
        ]  # fmt: skip
        begins = [[begin + at * frame for at in range(length)] for begin, _ in windows]
        seconds = [
            [part_of(begin, begin + frame, end) for begin in row] for row, (_, end) in zip(begins, windows, strict=True)
        ]
        names = [[f"{begin:.2f} s" for begin in row] for row in begins]
        ids = torch.arange(length, device=self._device).expand(len(windows), -1)
        return Stack(ids, None, [[None] * length] * len(windows), names, seconds=seconds)
