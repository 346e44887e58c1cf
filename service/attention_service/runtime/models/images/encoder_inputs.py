"""The input of an encoder of images: pixels by the checkpoint's own image processor, and a label for every token."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.models import ModelInput
from attention_service.runtime.models.attention_places import AttentionPlace
from attention_service.runtime.models.images.image_decoding import decoded
from attention_service.runtime.models.images.patch_grids import Patch, crops_of
from attention_service.runtime.models.model_inputs import InputReader, Inputs, Stack
from attention_service.runtime.models.module_hooks import before

GRAY = Image.new("RGB", (64, 64), (128, 128, 128))
"""The image of short runs."""


class EncoderInputs(InputReader):
    """Reads the images of one encoder."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's image processor. Raises InvalidCheckpoint without one."""
        if processor is None:
            raise InvalidCheckpoint(
                "checkpoint: it has no image processor (preprocessor_config.json) that runs with Pillow alone",
                param="checkpoint",
            )
        self.pairs, self.tokenizer, self.max_length = False, None, None
        self.names = frozenset(inspect.signature(model.forward).parameters)
        self._classes = {int(each): name for each, name in (model.config.id2label or {}).items()}
        self.vocabulary = len(self._classes)
        self._registers = int(getattr(model.config, "num_register_tokens", None) or 0)
        self._device, self._processor = model.device, processor
        self._patch = patch_size(model.config)
        self.crops = lru_cache(256)(lambda width, height: crops_of(processor, width, height, self._patch))
        self._length = self._first = 0
        """The tokens of the short run, and the one that is its first patch; negative if none is."""

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return ["images"]

    def short_run(self) -> dict[str, Tensor]:
        """The arguments of a run over a gray image."""
        return self._processed([GRAY])

    @torch.no_grad()
    def find_patches(self, places: Sequence[AttentionPlace], run: Callable[[dict[str, Tensor]], Any]) -> None:
        """Find the tokens that are patches: the last one is the token that its pixels change.

        Raises InvalidCheckpoint for a model that does not have the same tokens in all layers.
        """
        arguments, states = self.short_run(), list[Tensor]()
        crop, (down, across) = self.crops(*GRAY.size)[0], self._patch
        pixels = arguments["pixel_values"].clone()
        if pixels.ndim == 3:  # rows of patches
            pixels[0, crop.rows * crop.columns - 1] += 1
        else:
            pixels[..., : crop.rows * down, : crop.columns * across][..., -down:, -across:] += 1
        undo = before(places[0].first_layer, lambda state: states.append(state.detach().double()))
        try:
            for each in (arguments["pixel_values"], pixels):
                run(arguments | {"pixel_values": each})
        finally:
            undo()
        change = (states[1] - states[0])[0].norm(dim=-1)
        self._length = len(change)
        if any(place.length != self._length for place in places):
            raise InvalidCheckpoint(
                "checkpoint: its layers attend over windows or over merged patches, and an encoder of images here over "
                "all of them",
                param="checkpoint",
            )
        self._first = int(change.argmax()) + 1 - crop.rows * crop.columns

    def read(self, request: ModelInput) -> Inputs:
        """Read the images of a request. Raises InvalidRequest that names the field at fault."""
        for field in ("text", "tokens", "messages", "target"):
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field}: this model reads images alone", param=field)
        images = decoded(request.images)
        arguments = self._processed(images)
        pixels, mask = arguments["pixel_values"], arguments.get("pixel_attention_mask")
        length = pixels.shape[1] if pixels.ndim == 3 else None
        rows = [self._tokens(number, image, length) for number, image in enumerate(images)]
        length = len(rows[0])
        ids = torch.arange(length, device=self._device).expand(len(rows), -1)
        names = [self._names(row, len(rows)) for row in rows]
        mask = None if mask is None or bool(mask.all()) else mask.bool()
        stack = Stack(ids, mask, [[None] * length] * len(rows), names, rows)
        return Inputs(len(images) > 1, stack, None, arguments)

    def readable(self, ids: Sequence[int]) -> list[str]:
        """The names of these classes."""
        return [str(self._classes.get(each, each)) for each in ids]

    def token_id(self, token: int | str, param: str) -> int:
        """The number of a class, given as such or by its name. Raises InvalidRequest."""
        found = [each for each, name in self._classes.items() if token in (each, name)]
        if len(found) != 1:
            raise InvalidRequest(
                f"{param}: {token!r} is none of the {self.vocabulary} classes", param=param, limit=self.vocabulary
            )
        return found[0]

    def _processed(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        try:
            made = self._processor(images=list(images), return_tensors="pt")
        except (ValueError, TypeError, RuntimeError) as fault:
            reason = str(fault).partition("\n")[0][:120]
            raise InvalidRequest(
                f"images: the model's image processor refuses them: {reason}", param="images"
            ) from None
        arguments = {name: x.to(self._device) for name, x in made.items() if name in self.names}
        mask = arguments.get("pixel_attention_mask")
        if mask is not None and arguments["pixel_values"].ndim == 3:  # rows of patches, padded for batches of any kind
            longest = int(mask.sum(1).max())
            arguments |= {name: arguments[name][:, :longest] for name in ("pixel_values", "pixel_attention_mask")}
        return arguments

    def _tokens(self, number: int, image: Image.Image, length: int | None) -> list[Patch | None]:
        """The tokens of one image; ``length``: their number, if it is not that of the short run."""
        patches, length = self.crops(*image.size)[0].patches(number, 0), length or self._length
        behind = length - self._first - len(patches)
        if self._first < 0 or behind < 0:
            return [None] * length
        return [*[None] * self._first, *patches, *[None] * behind]

    def _names(self, row: Sequence[Patch | None], images: int) -> list[str]:
        """The tokens of an image for reading."""
        found, others = [], 0
        for each in row:
            if each is not None:
                found.append(patch_name(each, images))
                continue
            name = f"register {others - 1}" if self._registers else f"token {others}"
            found.append("CLS" if self._first > 0 and not others else name)
            others += 1
        return found


def patch_name(patch: Patch, images: int) -> str:
    """A patch for reading."""
    return f"[{patch.row},{patch.column}]" if images == 1 else f"[{patch.image}:{patch.row},{patch.column}]"


def patch_size(config: Any) -> tuple[int, int]:
    """Height and width of a model's patches. Raises InvalidCheckpoint for one that has none."""
    told = getattr(config, "patch_size", None)
    if isinstance(told, int):
        return told, told
    if isinstance(told, list | tuple) and len(told) == 2:
        return int(told[0]), int(told[1])
    raise InvalidCheckpoint(
        f"checkpoint: a {config.model_type} sees no square patches of an image, and a model here has them as tokens",
        param="checkpoint",
    )
