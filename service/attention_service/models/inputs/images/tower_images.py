"""The pixels of images as timm and OpenCLIP prepare them, by Pillow: their steps round where transformers' do not."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers.image_utils import SizeDict

from attention_service.modules.checkpoints.forms.form import ImageSteps

_FILTERS: Final = {name.lower(): value for name, value in Image.Resampling.__members__.items()}


class TowerImages:
    """Prepares images as ``torchvision.transforms`` do: resize, crop the middle, scale, normalize."""

    def __init__(self, steps: ImageSteps) -> None:
        self._steps = steps
        edges = {"shortest_edge": min(steps.scale)} if steps.resizing == "shortest" else {
            "longest_edge": max(steps.scale)}  # fmt: skip
        self.size = SizeDict(**edges)
        """The side to which images are resized, as the processors of transformers name it."""

    def __call__(
        self, images: Sequence[Image.Image], *, do_rescale: bool = True, do_normalize: bool = True, **_: Any
    ) -> dict[str, Tensor]:
        """Return ``pixel_values [B, 3, height, width]``."""
        rows = [torch.from_numpy(np.array(self._cropped(image))).permute(2, 0, 1).float() for image in images]
        pixels = torch.stack(rows)
        if do_rescale:
            pixels = pixels / 255
        if do_normalize:
            mean, std = (torch.tensor(channels).view(-1, 1, 1) for channels in (self._steps.mean, self._steps.std))
            pixels = (pixels - mean) / std
        return {"pixel_values": pixels}

    def _cropped(self, image: Image.Image) -> Image.Image:
        """The part of an image that is seen, in the size of the model."""
        steps = self._steps
        resized = image.resize(self._resized(*image.size), _FILTERS[steps.interpolation])
        height, width = steps.size
        missing = max(0, width - resized.width), max(0, height - resized.height)
        if any(missing):
            colour = steps.border if steps.resizing == "longest" else (0, 0, 0)
            before = [missing_pixels // 2 for missing_pixels in missing]
            behind = [(missing_pixels + 1) // 2 for missing_pixels in missing]
            resized = ImageOps.expand(resized, (*before, *behind), colour)
        left, top = (round((have - want) / 2) for have, want in ((resized.width, width), (resized.height, height)))
        return resized.crop((left, top, left + width, top + height))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image."""
        down, across = self._steps.scale
        if self._steps.resizing == "squash":
            return across, down
        if self._steps.resizing == "shortest" and down == across:
            short, long = sorted((width, height))
            other = int(down * long / short)
            return (down, other) if width <= height else (other, down)
        ratios = height / down, width / across
        ratio = max(ratios) if self._steps.resizing == "longest" else min(ratios)
        return round(width / ratio), round(height / ratio)
