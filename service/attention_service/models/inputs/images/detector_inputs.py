"""The input of a detector such as DETR: an encoder attends over the places of a feature map, a decoder over objects.

A convolutional backbone makes the feature map. Each place is a square of pixels, as large as the backbone's stride, and
sees pixels around it too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs, gray, object_name
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Stack
from attention_service.models.inputs.model_limits import object_count
from attention_service.models.inputs.patch_grids import Patch, patch_name
from attention_service.models.passes.attention_places import AttentionPlace, TokensOf, stack_of
from attention_service.models.passes.run_records import RunRecord
from attention_transformers.model_layers import type_names

_STACKS: Final[Mapping[str, tuple[TokensOf, TokensOf]]] = {
    "encoder": ("text", "text"), "decoder": ("target", "target"), "cross": ("target", "text"),
}  # fmt: skip
"""The queries and keys of the layers of each stack: the places are the encoder's text, the objects the decoder's."""
_BACKBONE_COPIES: Final = 4
"""Tensors as large as the backbone's largest that are in memory at once."""
_SAMPLES: Final = "MultiscaleDeformableAttention"
"""The end of the names of classes that attend to sampled points. Source: Zhu et al. 2021, section 4.1."""


def is_detector(model: PreTrainedModel) -> bool:
    """True for a model of images that asks for objects, and whose tokens are no patches of one size."""
    config = model.config
    return object_count(config) > 0 and getattr(config, "patch_size", None) is None


class DetectorInputs(EncoderInputs):
    """Reads the images of one detector."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's image processor. Raises InvalidCheckpoint without one."""
        super().__init__(model, processor)
        self._model, self.pairs, self.objects = model, True, object_count(model.config)
        self._backbone_numbers = 0.0
        """Numbers of the backbone's largest tensor for each pixel of an image."""

    def _patch_size(self, config: Any) -> tuple[int, int]:
        return 1, 1  # until the parts are found

    def placed(self, place: AttentionPlace) -> AttentionPlace:
        """An attention with the tokens that it is over."""
        queries, keys = _STACKS[_stack_of(place)]
        return replace(place, queries=queries, keys=keys)

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the stride of the feature map. See ``InputReader.find_parts``."""
        encoder = next((place for place in places if _stack_of(place) == "encoder"), None)
        if encoder is None:
            raise InvalidCheckpoint.at("checkpoint", self._refusal("no encoder that attends over a feature map"))
        height, width = self.short_runs()[0]["pixel_values"].shape[-2:]
        maps = feature_maps(encoder, record)
        self._backbone_numbers = max(map(math.prod, maps), default=0) / (height * width)
        grid = next((shape[2:] for shape in reversed(maps) if math.prod(shape[2:]) == encoder.length), None)
        stride = 0 if grid is None else 2 ** round(math.log2(height / grid[0]))
        self._patch = stride, stride
        if grid is None or tuple(grid) != self._grid(height, width):
            raise InvalidCheckpoint.at("checkpoint", self._refusal("an encoder over other tokens than one feature map"))
        self._length = encoder.length
        for place in places:
            keys = {"text": self._length, "target": self.objects}
            tokens = _STACKS.get(_stack_of(place))
            if tokens is None or keys.get(tokens[1] or "") != place.length:
                raise InvalidCheckpoint.at(
                    "checkpoint", self._refusal(f"a layer {place.key} that attends over neither objects nor places")
                )
        return {}

    def read(self, request: ModelInput) -> Inputs:
        """Read the images of a request. Raises InvalidRequest that names the field at fault."""
        images = self._images(request)
        arguments, count = self._processed(images), len(images)
        rows, columns = self._grid(*arguments["pixel_values"].shape[-2:])
        patches = [
            replace(self.crops(*image.size)[0], rows=rows, columns=columns).patches(number, 0)
            for number, image in enumerate(images)
        ]
        names = [[patch_name(patch, count) for patch in row] for row in patches]
        mask = _of_places(arguments.get("pixel_mask"), rows, columns)
        shown: list[list[Patch | None]] = [[*row] for row in patches]
        places = Stack(self._ids(rows * columns, count), mask, [[None] * (rows * columns)] * count, names, shown)
        known = [object_name(number) for number in range(self.objects)]
        objects = Stack(self._ids(self.objects, count), None, [[None] * self.objects] * count, [known] * count)
        return Inputs(count > 1, places, objects, arguments)

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the places of an image of this size. Raises InvalidRequest."""
        length = math.prod(self._grid(*self._processed([gray(width, height)])["pixel_values"].shape[-2:]))
        return SizedImage(length, 1, length)

    def front_bytes(self, arguments: Mapping[str, Tensor]) -> int:
        """The memory of the backbone."""
        batch, _, height, width = arguments["pixel_values"].shape
        return int(_BACKBONE_COPIES * self._backbone_numbers * batch * height * width * self._model.dtype.itemsize)

    def _ids(self, length: int, count: int) -> Tensor:
        return torch.arange(length, device=self._device).expand(count, -1)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of the feature map of a picture of so many pixels."""
        down, across = self._patch
        return (-(-height // down), -(-width // across)) if down and across else (0, 0)

    def _refusal(self, has: str) -> str:
        """The reason for a detector that is not read, which ``has`` layers of another kind."""
        names = type_names(self._model.modules())
        sampled = [f"; {name} attends to points that it samples between places" for name in names if _SAMPLES in name]
        more = f"{sampled[-1]}, which are no tokens that could be named" if sampled else ""
        return f"{type(self._model).__name__} has {has}{more}"


def feature_maps(encoder: AttentionPlace, record: RunRecord) -> list[torch.Size]:
    """The shapes ``[B, width, rows, columns]`` of the states before the encoder runs."""
    layer = {*encoder.first_layer.modules()}
    before = takewhile(lambda call: call.module not in layer, record.calls)
    return [call.made for call in before if call.made is not None and len(call.made) == 4]


def _stack_of(place: AttentionPlace) -> str:
    stack = str(place.key).rpartition(".")[0]
    return stack if stack == "cross" else stack_of(place.key)


def _of_places(pixels: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """Bool ``[B, places]``: those that are no padding, as the model takes them of the pixels; None if none is."""
    if pixels is None:
        return None
    covered = nn.functional.interpolate(pixels[None].float(), size=(rows, columns))[0].bool().flatten(1)
    return None if bool(covered.all()) else covered
