"""The input of a model that hears: features by the checkpoint's own extractor, and a label for every frame."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.input_stacks import Inputs, Stack, Tokens
from attention_service.models.inputs.model_inputs import TextInputs
from attention_service.models.inputs.sounds.sound_decoding import Sound, decoded
from attention_service.models.inputs.sounds.sound_frames import feature_samples, frames_of
from attention_service.models.passes.attention_places import TARGET, AttentionPlace
from attention_service.models.passes.run_records import RunRecord

_SHORT: Final = 16_000
"""Samples of the silent sound of short runs."""
_UNMASKED: Final = frozenset({"data2vec-audio"})
"""Types whose convolutions of positions, one behind the other, reach into what fills up a batch."""
_MASKS: Final = "attention_mask", "input_features_mask", "feature_attention_mask"
"""The names that models give to the mask of their features."""
_CONVOLUTION_COPIES: Final = 4
"""Tensors as wide as the widest convolution that are in memory at once."""


class SoundInputs(TextInputs):
    """Reads the sounds of one encoder, and the target of its decoder if it has one."""

    reads = "sound (audio)"
    enters = "frames"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, extractor: Any) -> None:
        """``extractor``: the checkpoint's feature extractor. Raises InvalidCheckpoint without one."""
        frames = None if extractor is None else frames_of(model, extractor)
        if frames is None:
            lacks = "no feature extractor (preprocessor_config.json)" if extractor is None else "no rule for its frames"
            raise InvalidCheckpoint.at("checkpoint", f"it has {lacks}, by which sounds are read")
        super().__init__(model, tokenizer)
        self.pairs, self.shifts = "decoder_input_ids" in self.names, False
        self.transcribes = self.pairs
        if self.pairs:
            self.reads = "sound (audio) and a target"
        if isinstance(most := getattr(model.config, "max_target_positions", None), int):
            self.max_length = most  # of the decoder
        self._extractor, self._made, self._main = extractor, frames, model.main_input_name
        self.rate = int(extractor.sampling_rate)
        """Samples a second."""
        if self._made.most_samples is not None:
            self.hears_s = self._made.most_samples / self.rate
        options = inspect.signature(extractor.__call__).parameters
        self._mask = next((name for name in _MASKS if name in self.names), None)
        self._options: dict[str, Any] = {}
        if "padding" in options and not options["padding"].default:
            self._options["padding"] = True
        if self._mask not in {None, _MASKS[0]} and "return_attention_mask" in options:
            self._options["return_attention_mask"] = True  # no such model runs without
        self._hop = feature_samples(model, extractor) or 1
        """Samples of a feature."""
        self.short_text = self._made.count(self._features(self.short_runs()[0]))
        self._masks = model.config.model_type not in _UNMASKED and not any(
            isinstance(module, nn.GroupNorm) for module in model.modules()
        )
        """True if its numbers are the same whatever fills up a batch: no norm is over time, and no padding leaks."""
        self._widest = _widest(model) * model.dtype.itemsize

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return ["audio", "target"] if self.pairs and self.tokenizer is not None else ["audio"]

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a silent sound."""
        silence = torch.zeros(min(_SHORT, self._made.most_samples or _SHORT)).numpy()
        arguments = self._processed([Sound(silence, len(silence) / self.rate)])
        if self.pairs:
            arguments["decoder_input_ids"] = torch.arange(1, TARGET + 1, device=self._device)[None]
        return [arguments]

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Check that the layers attend over the frames, and that the model returns a state of each.

        Raises InvalidCheckpoint for another model.
        """
        if places[0].queries != "text":
            raise InvalidCheckpoint.at(
                "checkpoint", "its layers attend over other tokens than the frames that it makes of a sound"
            )
        states = None if self.pairs else getattr(record.output, "last_hidden_state", None)
        if states is not None and states.shape[1] != self.short_text:
            raise InvalidCheckpoint.at(
                "checkpoint", "its output pools the frames of its layers; load the model whose encoder it is"
            )
        return {}

    def to_transcribe(self, sound: Sound, language: str | None, instruction: str | None) -> Inputs:
        """Read a sound whose text is to be written. ``generate`` takes the language and the prompt by itself."""
        arguments = self.heard([sound])
        return Inputs(False, self.frames([sound], arguments), None, arguments)

    def read(self, request: ModelInput) -> Inputs:
        """Read the sounds of a request. Raises InvalidRequest that names the field at fault."""
        for field in ("text", "tokens", "messages"):
            if getattr(request, field) is not None:
                raise self.refused(field)
        if request.images or not request.audio:
            raise self.refused("images" if request.images else "audio")
        sounds = decoded(request.audio, self.rate)
        arguments, target = self.heard(sounds), None
        stack = self.frames(sounds, arguments)
        if self.pairs:
            target = self._target(request.target, len(sounds))
            arguments["decoder_input_ids"] = target.ids
        elif request.target is not None:
            raise InvalidRequest.at("target", "the model has one stack and reads only sound")
        return Inputs(len(sounds) > 1, stack, target, arguments)

    def heard(self, sounds: Sequence[Sound]) -> dict[str, Tensor]:
        """The model's arguments for these sounds. Raises InvalidRequest for one that is too short or too long."""
        most = self._made.most_samples
        for index, sound in enumerate(sounds):
            if most is not None and len(sound.samples) > most:
                raise InvalidRequest.at(
                    f"audio.{index}",
                    f"{sound.seconds:.2f} s; the model hears {most / self.rate:g} s at a time. Send parts",
                    limit=most,
                )
            if self._made.count(len(sound.samples) // self._hop) < 1:
                raise InvalidRequest.at(f"audio.{index}", f"{sound.seconds:.4f} s is too short for one frame")
        arguments = self._processed(sounds)
        unlike = len({len(sound.samples) for sound in sounds}) > 1
        if unlike and most is None and not (self._masks and self._mask in arguments):
            raise InvalidRequest.at(
                "audio",
                "sounds of different lengths: what fills up a batch would change this model's numbers. Send one",
            )
        return arguments

    def frames(self, sounds: Sequence[Sound], arguments: dict[str, Tensor]) -> Stack:
        """The frames of these sounds as tokens."""
        length = self._made.count(self._features(arguments))
        ids = torch.arange(length, device=self._device).expand(len(sounds), -1)
        mask = None
        # Whisper, whose mask has the first name, attends to what its sounds are filled up with.
        hides = self._made.most_samples is None or self._mask != _MASKS[0]
        if hides and (real := arguments.get(self._mask or "")) is not None:
            own = torch.tensor([self._made.count(int(frames)) for frames in real.sum(1)], device=self._device)
            mask = torch.arange(length, device=self._device) < own[:, None]
            mask = None if bool(mask.all()) else mask
        seconds = [self._made.seconds(length, sound.seconds) for sound in sounds]
        names = [self._made.names(length)] * len(sounds)
        return Stack(ids, mask, [[None] * length] * len(sounds), names, seconds=seconds)

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory of the convolutions that make frames of features."""
        return int(_CONVOLUTION_COPIES * len(arguments[self._main]) * self._features(arguments) * self._widest)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest: tokens are no input here."""
        raise self.refused(param)

    def _features(self, arguments: Mapping[str, Tensor]) -> int:
        """The features of each sound; of a spectrogram, those along time."""
        x = arguments[self._main]
        return int(x.shape[2] if x.ndim > 2 and x.shape[1] == self._extractor.feature_size else x.shape[1])

    def _target_tokens(self, tokenizer: PreTrainedTokenizerBase, target: str) -> Tokens:
        own = self.tokens(target, "target", special=False)  # it may bring those of language and task
        return own if own.ids[0] == self._start else super()._target_tokens(tokenizer, target)

    def _known_ids(self, model: PreTrainedModel) -> int:
        if "decoder_input_ids" in self.names:
            return super()._known_ids(model)
        return int(getattr(model.config, "vocab_size", 0))

    def _processed(self, sounds: Sequence[Sound]) -> dict[str, Tensor]:
        try:
            made = self._extractor(
                [sound.samples for sound in sounds], sampling_rate=self.rate, return_tensors="pt", **self._options
            )
        except (ValueError, TypeError, RuntimeError, IndexError) as fault:
            reason = str(fault).partition("\n")[0][:120]
            raise InvalidRequest.at("audio", f"the model's feature extractor refuses them: {reason}") from None
        named = {self._mask if name in _MASKS else name: torch.as_tensor(x) for name, x in made.items()}
        return {name: x.to(self._device) for name, x in named.items() if name in self.names}


def _widest(model: PreTrainedModel) -> float:
    """The most numbers that a convolution has for each feature."""
    widest, stride = 1.0, 1
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            stride *= module.stride[0]
            widest = max(widest, module.out_channels / stride)
    return widest
