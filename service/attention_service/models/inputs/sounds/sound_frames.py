"""The tokens that a model makes of a sound: frames along time, or patches of its spectrogram, and their seconds."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_service.models.inputs.input_stacks import Seconds

_RULES: Final = "_get_feat_extract_output_lengths", "_get_subsampling_output_length"
_MANY: Final = 2**24
"""Features by whose frames the stride of a model is found."""


@dataclass(frozen=True)
class StridedFrames:
    """Frames of equal strides, one behind the other."""

    lengths: Callable[[Tensor], Any]
    """The number of frames of so many features, as the model itself finds it."""
    stride: float
    """Seconds."""
    most_samples: int | None
    """The samples to which each sound is filled up; None if a sound may have any length."""

    def count(self, features: int) -> int:
        """The number of frames that are made of so many features."""
        return int(self.lengths(torch.tensor(features)))

    def seconds(self, count: int, end: float) -> list[Seconds]:
        """The seconds of each frame; None behind the end of the sound."""
        return [part_of(number * self.stride, (number + 1) * self.stride, end) for number in range(count)]

    def names(self, count: int) -> list[str]:
        """The second at which each frame begins."""
        return [f"{number * self.stride:.2f} s" for number in range(count)]


@dataclass(frozen=True)
class SpectrogramPatches:
    """Patches of a spectrogram of one length, by frequency and then by time, behind other tokens. Source: Gong 2021."""

    rows: int
    columns: int
    stride: float
    """Seconds from patch to patch."""
    width: float
    """Seconds of a patch, which overlaps the next."""
    most_samples: int | None
    specials: tuple[str, ...] = ("CLS", "distillation")

    def count(self, features: int) -> int:
        """The number of patches and other tokens, the same of each sound."""
        return len(self.specials) + self.rows * self.columns if features > 0 else 0

    def seconds(self, count: int, end: float) -> list[Seconds]:
        """The seconds of each patch; None behind the end of the sound."""
        row = [part_of(at * self.stride, at * self.stride + self.width, end) for at in range(self.columns)]
        return [*[None] * len(self.specials), *row * self.rows]

    def names(self, count: int) -> list[str]:
        """The second at which each patch begins, and its row, from low frequencies."""
        parts = [f"{at * self.stride:.2f} s/{row}" for row in range(self.rows) for at in range(self.columns)]
        return [*self.specials, *parts]


Frames = StridedFrames | SpectrogramPatches
"""The tokens of a sound."""


def frames_of(model: PreTrainedModel, extractor: Any) -> Frames | None:
    """The tokens that a model makes of the features of its extractor; None if it does not tell."""
    rate, config = int(extractor.sampling_rate), model.config
    if config.model_type == "audio-spectrogram-transformer":
        step, patch = 0.01, int(config.patch_size)  # of Kaldi's filter banks
        rows, columns = (
            (size - patch) // stride + 1
            for size, stride in (
                (config.num_mel_bins, config.frequency_stride), (config.max_length, config.time_stride)
            )
        )  # fmt: skip
        most = round(config.max_length * step * rate)
        return SpectrogramPatches(rows, columns, config.time_stride * step, patch * step, most)
    lengths, hop = _lengths(model), feature_samples(model, extractor)
    if lengths is None or hop is None:
        return None
    many = int(lengths(torch.tensor(2 * _MANY))) - int(lengths(torch.tensor(_MANY)))
    filled = getattr(extractor, "n_samples", None)
    return StridedFrames(lengths, hop * round(_MANY / many) / rate, filled if isinstance(filled, int) else None)


def feature_samples(model: PreTrainedModel, extractor: Any) -> int | None:
    """The samples of a feature; None if the extractor does not tell."""
    if model.main_input_name == "input_values":
        return 1
    hop = getattr(extractor, "hop_length", None)
    return hop if isinstance(hop, int) else None


def _lengths(model: PreTrainedModel) -> Callable[[Tensor], Any] | None:
    """The model's own function from features to the frames of its layers; None if it has none."""
    own: Any = next((rule for name in _RULES if (rule := getattr(model, name, None)) is not None), None)
    if own is None:
        return None
    # An adapter stands behind the layers.
    options = {"add_adapter": False} if "add_adapter" in inspect.signature(own).parameters else {}

    def lengths(features: Tensor) -> Any:
        counted = own(features, **options)
        return (
            counted[0] if isinstance(counted, tuple) else counted
        )  # the second is the length of what is pooled after them

    return lengths


def part_of(begin: float, end: float, last: float) -> Seconds:
    """The seconds of a frame of a sound that ends at ``last``; None behind its end."""
    return (round(begin, 6), round(min(end, last), 6)) if round(begin, 6) < last else None
