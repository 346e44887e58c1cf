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
from attention_contract.schemas.prompts import AudioPart, InputAudioPart, Message, ModelInput, TextPart
from attention_service.models.inputs.conversations import ChatForm, Conversation, as_template_reads, token_parts
from attention_service.models.inputs.images.prompt_inputs import tokens_of
from attention_service.models.inputs.input_stacks import Inputs, Seconds, Stack, Tokens, parted_answer
from attention_service.models.inputs.model_inputs import InputReader, default_template
from attention_service.models.inputs.sounds.sound_decoding import Sound, decoded
from attention_service.models.inputs.sounds.sound_frames import part_of
from attention_service.models.passes.attention_places import AttentionPlace

_SHORT: Final = 1.0
"""Seconds of the silent sound of a short run."""
_LEAST: Final = 2
"""Tokens of a sound: of one alone Qwen2-Audio makes another prompt."""
_COPIES: Final = 4
"""Tensors as wide as a convolution that are in memory at once."""


class SoundPrompts(InputReader):
    """Reads the texts and sounds of one model."""

    senses = "hears sounds"

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's. Raises InvalidCheckpoint for one whose features are not Whisper's."""
        super().__init__(model, processor.tokenizer)
        extractor = processor.feature_extractor
        if not isinstance(extractor, WhisperFeatureExtractor):
            name = type(extractor).__name__
            raise InvalidCheckpoint.at("checkpoint", f"it hears by {name}; sounds in texts need Whisper's")
        self.template = default_template(getattr(processor, "chat_template", None)) or self.template
        self._processor, self._mark = processor, str(processor.audio_token)
        self._audio_token = int(processor.tokenizer.convert_tokens_to_ids(self._mark))
        around = (getattr(processor, name, None) or "" for name in ("audio_bos_token", "audio_eos_token"))
        self._before = self._mark.join(around)
        """A sound before a text."""
        self.rate = int(extractor.sampling_rate)
        self._window = float(extractor.n_samples) / self.rate
        """The seconds that the layers hear at a time."""
        self._most = float(getattr(processor, "max_audio_len", None) or self._window)
        """Seconds of a sound, beyond which its processor would cut it."""
        whole = self._processed(self._mark, [self._silence(self._window)])
        self._stride = self._window / whole["input_ids"][0].tolist().count(self._audio_token)
        """Seconds of a token."""
        self._length = 0
        """The frames of a window in the layers that hear."""

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return [*super().takes, "audio"]

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a few tokens, and of one over a silent sound."""
        return [*super().short_runs(), self._arguments(self._processed(self._mark, [self._silence(_SHORT)]))]

    def find_parts(self, places: Sequence[AttentionPlace], _: Callable[[dict[str, Tensor]], Any]) -> bool:
        """Find the frames of a window, in the layers that hear. False if these have unlike ones."""
        self._length = places[0].length
        return all(place.length == self._length for place in places)

    def absent(self, inputs: Inputs) -> str | None:
        """Return ``media`` for a text without sounds."""
        return "media" if inputs.media is None else None

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        sent = request.all_audio
        if not sent:
            return super().read(request)
        if request.text_pair is not None or isinstance(request.answer, list):
            raise InvalidRequest.at("answer" if request.text_pair is None else "text_pair", "sounds go with one text")
        if request.target is not None or isinstance(request.text or (request.tokens or [0])[0], list):
            raise InvalidRequest.at("audio", "they go with one text, without a target")
        sounds = decoded(sent, self.rate)
        for index, sound in enumerate(sounds):
            if not _LEAST * self._stride <= sound.seconds <= self._most:
                raise InvalidRequest.at(
                    f"audio.{index}",
                    f"{sound.seconds:.2f} s; the model hears {_LEAST * self._stride:g} to {self._most:g} s at a time",
                    limit=self._most,
                )
        made, tokens, field = self._prompt(request, [sound.samples for sound in sounds])
        self.check(tokens.ids, field, sounds=True)
        ids = torch.tensor([tokens.ids], device=self._device)
        parts = None if tokens.parts is None else [tokens.parts]
        seconds = self._seconds(tokens.ids, sounds, field)
        names = [
            name if each is None else f"{each[0]:.2f} s"
            for name, each in zip(self.readable(tokens.ids), seconds, strict=True)
        ]
        stack = Stack(ids, None, [tokens.spans], [names], parts=parts, seconds=[seconds])
        return Inputs(False, stack, None, self._arguments(made), self._heard(sounds))

    def check(self, ids: Sequence[int], param: str, *, sounds: bool = False) -> None:
        """Raise InvalidRequest for ids that the model does not know, too many, or places for sounds that did not come.

        ``sounds``: True if they came.
        """
        super().check(ids, param)
        if not sounds and self._audio_token in ids:
            raise InvalidRequest.at(param, "it has a place for a sound, but no sound was sent")

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory of the convolutions that make frames of features."""
        features = arguments.get("input_features")
        if features is None:
            return 0
        return int(_COPIES * len(features) * features.shape[-1] * features.shape[-2] * features.itemsize)

    def content(self, message: Message) -> Any:
        """The content of a message for the chat template: a list of parts. Raises InvalidRequest for an image."""
        if message.content is None:
            return None
        if isinstance(message.content, str):
            return [{"type": "text", "text": message.content}]
        if any(not isinstance(part, TextPart | AudioPart | InputAudioPart) for part in message.content):
            raise InvalidRequest.at("messages", f"images: {self.takes_no_images}")
        return [part.model_dump() if isinstance(part, TextPart) else {"type": "audio"} for part in message.content]

    def _prompt(self, request: ModelInput, samples: list[Any]) -> tuple[dict[str, Any], Tokens, str]:
        """A request as the processor makes it, its tokens, and the field that they come from."""
        if request.messages is not None:
            written = self._with_sounds(request.messages, len(samples), ChatForm.of(request))
            made = self._processed(written.text, samples, add_special_tokens=False)
            tokens = tokens_of(made)
            return made, tokens._replace(parts=token_parts(tokens.spans, written.parts)), "messages"
        if request.tokens is not None:
            made = self._processed(self._mark * len(samples), samples)
            ids = [int(each) for each in request.tokens if isinstance(each, int)]
            if ids.count(self._audio_token) != made["input_ids"][0].tolist().count(self._audio_token):
                raise InvalidRequest.at("tokens", "the number of audio tokens does not match the sounds")
            made |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
            return made, Tokens(ids, [None] * len(ids)), "tokens"
        text = request.text if isinstance(request.text, str) else ""
        before = "" if self._mark in text else self._before * len(samples)
        made = self._processed(before + text + str(request.answer or ""), samples)
        tokens = tokens_of(made, len(before))
        tokens = tokens if request.answer is None else parted_answer(tokens, len(text))
        return made, tokens, "text" if request.text else "audio"

    def _with_sounds(self, messages: Sequence[Message], sounds: int, form: ChatForm) -> Conversation:
        """A conversation with places for sounds: before the text of the first message, if it has none."""
        turns = [as_template_reads(message, self.content(message)) for message in messages]
        if not any(part["type"] == "audio" for message in turns for part in message["content"] or ()):
            turns[0]["content"] = [{"type": "audio"}] * sounds + (turns[0]["content"] or [])
        return self._written(turns, form, parted=True)

    def _processed(self, text: str, sounds: Sequence[Any], **options: Any) -> dict[str, Any]:
        try:
            return dict(self._processor(
                text=[text], audio=list(sounds), return_tensors="pt", sampling_rate=self.rate,
                return_offsets_mapping=self.tokenizer is not None and bool(self.tokenizer.is_fast),
                return_text_replacement_offsets=True, **options,
            ))  # fmt: skip
        except (ValueError, TypeError, RuntimeError, IndexError, StopIteration) as fault:
            reason = str(fault).partition("\n")[0][:160]
            raise InvalidRequest.at("audio", f"the model's processor refuses them: {reason}") from None

    def _silence(self, seconds: float) -> Any:
        return np.zeros(round(seconds * self.rate), np.float32)

    def _seconds(self, ids: Sequence[int], sounds: Sequence[Sound], field: str) -> list[Seconds]:
        """The part of a sound that each token of a prompt is; None of a token of the text. Raises InvalidRequest."""
        runs = [[*run] for own, run in groupby(range(len(ids)), lambda at: ids[at] == self._audio_token) if own]
        if len(runs) != len(sounds):
            raise InvalidRequest.at(field, "two sounds follow each other directly; put a text between them")
        found: list[Seconds] = [None] * len(ids)
        for run, sound in zip(runs, sounds, strict=True):
            for number, at in enumerate(run):
                found[at] = part_of(number * self._stride, (number + 1) * self._stride, sound.seconds)
        return found

    def _heard(self, sounds: Sequence[Sound]) -> Stack:
        """The frames of the layers that hear, a row for each window of a sound."""
        frame, length = self._window / self._length, self._length
        windows = [
            (window * self._window, sound.seconds)
            for sound in sounds for window in range(max(1, ceil(round(sound.seconds / self._window, 6))))
        ]  # fmt: skip
        begins = [[begin + at * frame for at in range(length)] for begin, _ in windows]
        seconds = [
            [part_of(each, each + frame, end) for each in row] for row, (_, end) in zip(begins, windows, strict=True)
        ]
        names = [[f"{each:.2f} s" for each in row] for row in begins]
        ids = torch.arange(length, device=self._device).expand(len(windows), -1)
        return Stack(ids, None, [[None] * length] * len(windows), names, seconds=seconds)
