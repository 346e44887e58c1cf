"""The input of an encoder of images: pixels by the checkpoint's own image processor, and a label for every token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.images.image_decoding import decoded, shortest_edge
from attention_service.models.inputs.images.unrolled_tokens import POOLED, find_unrolled_windows, stage_grids
from attention_service.models.inputs.images.window_search import find_windows, layer_calls
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Stack
from attention_service.models.inputs.patch_grids import Crop, Patch, crops_of, patch_name
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.layer_keys import LayerWindows
from attention_service.models.passes.module_hooks import before
from attention_service.models.passes.run_records import RunRecord
from attention_service.models.passes.unrun_models import reads_videos
from attention_transformers.model_layers import own_attentions, uses_interface

SHORT: Final = (64, 64)
"""Width and height of the gray image of short runs."""


class EncoderInputs(InputReader):
    """Reads the images of one encoder."""

    reads = "images"
    enters = "pixels"

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's image processor. Raises InvalidCheckpoint without one."""
        if processor is None:
            raise InvalidCheckpoint.at(
                "checkpoint", "it has no image processor (preprocessor_config.json) that runs with Pillow alone"
            )
        if not (any(map(uses_interface, model.modules())) or own_attentions(model)):
            raise InvalidCheckpoint.at(
                "checkpoint", f"{type(model).__name__} has no attention: none of its modules is one"
            )
        super().__init__(model)
        sees: Any = getattr(model.config, "vision_config", model.config)  # of CLIP that classifies, one of two
        self._registers = int(getattr(sees, "num_register_tokens", None) or 0)
        self.objects = int(getattr(sees, "num_detection_tokens", None) or 0)
        self._processor = processor
        self._patch, self.edge = self._patch_size(sees), shortest_edge(processor)
        self.crops = lru_cache(256)(lambda width, height: crops_of(processor, width, height, self._patch))
        self._grids = stage_grids(model)
        """The tokens of each stage, of a model that keeps them in another order than row by row."""
        self._mask_ratio: float | None = float(sees.mask_ratio) if "noise" in self.names and not self._grids else None
        """The share of patches that the model leaves out at random, as ViT-MAE; None for a model that sees all."""
        self.leaves_out = self._mask_ratio is not None
        self.windows: dict[str, LayerWindows] = {}
        """The windows of layers that attend within such, by the text of their keys."""
        self._size: torch.Size | None = None
        """Height and width of all pictures, of a model with windows; None for those of any size."""
        self._channels_first = False
        """True if the states between its layers are grids whose channels come first."""
        self._length = self._first = 0
        """The tokens of the short run, and the one that is its first patch; negative if none is."""

    @property
    def takes(self) -> list[str]:
        """The inputs that requests may have."""
        return ["images"]

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a gray image."""
        return [self._processed([gray(*SHORT)])]

    def _patch_size(self, config: Any) -> tuple[int, int]:
        """Height and width of a patch. Raises InvalidCheckpoint for a model that has none."""
        return patch_size(config)

    def placed(self, place: AttentionPlace) -> AttentionPlace:
        """An attention with the tokens that it is over, which are known once the parts are found."""
        return replace(place, windows=self.windows.get(str(place.key)), channels_first=self._channels_first)

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the tokens that are patches. See ``InputReader.find_parts``."""
        crop = self.crops(*SHORT)[0]
        if self._grids:
            return self._find_unrolled(places, run, crop)
        self._channels_first = channels_are_first(places[0], record)
        places = [replace(place, channels_first=self._channels_first) for place in places]
        if self._mask_ratio is None:
            self._length, self._first = patch_tokens(places[0], run, self.short_runs()[0], crop, self._patch)
        else:
            self._length, self._first = 1 + len(seen_patches(crop.rows * crop.columns, self._mask_ratio, 0)[0]), 1
        if cut := [place for place in places if place.length != self._length]:
            self._find_windows(cut, run, record, crop)
        return {}

    def _find_unrolled(self, places: Sequence[AttentionPlace], run: Callable[..., Any], crop: Crop) -> dict[str, str]:
        """Find the windows of an encoder that keeps its tokens in another order than row by row.

        Return the layers without any, with the reason.
        """
        arguments, first = self.short_runs()[0], self._grids[0]
        if (crop.rows, crop.columns) != (first.rows, first.columns):
            raise InvalidCheckpoint.at(
                "checkpoint",
                f"its image processor makes {crop.rows} × {crop.columns} patches of an image, and its config has "
                f"{first.rows} × {first.columns}",
            )
        by_layer = find_unrolled_windows(places, self._grids, lambda taps: run(arguments, attention_pass=taps))
        self.windows = {key: windows for key, windows in by_layer.items() if windows is not None}
        self._length, self._size = first.places.numel(), arguments["pixel_values"].shape[-2:]
        self.last_states = self._grids[-1].places.numel()
        return {key: POOLED for key in by_layer if key not in self.windows}

    def _find_windows(
        self,
        places: Sequence[AttentionPlace],
        run: Callable[[dict[str, Tensor]], Any],
        record: RunRecord,
        crop: Crop,
    ) -> None:
        """Find the windows of these layers. Raises InvalidCheckpoint for one that has none."""
        arguments = self.short_runs()[0]
        states = getattr(record.output, "last_hidden_state", None)
        self.last_states = states.shape[1] if states is not None and states.ndim == 3 else None
        for call in layer_calls(places, lambda: run(arguments)):
            windows = find_windows(call, crop.rows, crop.columns) if self._mask_ratio is None else None
            if windows is None or windows.order.shape[1] != call.place.length:
                raise InvalidCheckpoint.at(
                    "checkpoint",
                    f"layer {call.place.key} attends over other tokens than its patches or windows of them, such as "
                    "pooled or grouped ones; its weights have no keys that could be named",
                )
            self.windows[str(call.place.key)] = windows
        self._size = arguments["pixel_values"].shape[-2:]

    def read(self, request: ModelInput) -> Inputs:
        """Read the images of a request. Raises InvalidRequest that names the field at fault."""
        images = self._images(request)
        arguments = self._processed(images, request.mask_seed)
        if self._size is not None and self._size != (size := arguments["pixel_values"].shape[-2:]):
            raise InvalidRequest.at(
                "images",
                f"the image processor makes a picture of {size[0]} × {size[1]} pixels of it; the windows of this model "
                f"are known for {self._size[0]} × {self._size[1]}. Send an image of that form",
            )
        mask, length = arguments.get("pixel_attention_mask"), _rows_of_patches(arguments)
        rows = [self._tokens(number, image, length, request.mask_seed) for number, image in enumerate(images)]
        length = len(rows[0])
        ids = torch.arange(length, device=self._device).expand(len(rows), -1)
        names = [token_names(row, len(rows), self._registers, objects=self.objects) for row in rows]
        mask = None if mask is None or bool(mask.all()) else mask.bool()
        stack = Stack(ids, mask, [[None] * length] * len(rows), names, rows)
        return Inputs(len(images) > 1, stack, None, arguments)

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the tokens of an image of this size. Raises InvalidRequest."""
        length = _rows_of_patches(self._processed([gray(width, height)])) or self._length
        return SizedImage(length, 1, length)

    def _known_ids(self, model: PreTrainedModel) -> int:
        """The number of its classes."""
        return len(model.config.id2label or ())

    def _images(self, request: ModelInput) -> list[Image.Image]:
        """The images of a request. Raises InvalidRequest for one with other inputs."""
        for field in ("text", "tokens", "messages", "target", "text_pair", "answer", "audio"):
            if getattr(request, field):
                raise self.refused(field)
        return decoded(request.images)

    def _processed(self, images: Sequence[Image.Image], mask_seed: int = 0) -> dict[str, Tensor]:
        try:
            made = self._processor(images=list(images), return_tensors="pt")
        except (ValueError, TypeError, RuntimeError) as fault:
            reason = str(fault).partition("\n")[0][:120]
            raise InvalidRequest.at("images", f"the model's image processor refuses them: {reason}") from None
        arguments = {name: x.to(self._device) for name, x in made.items() if name in self.names}
        mask = arguments.get("pixel_attention_mask")
        if mask is not None and arguments["pixel_values"].ndim == 3:  # rows of patches, padded for batches of any kind
            longest = int(mask.sum(1).max())
            arguments |= {name: arguments[name][:, :longest] for name in ("pixel_values", "pixel_attention_mask")}
        if self._mask_ratio is not None:
            *_, height, width = arguments["pixel_values"].shape
            _, noise = seen_patches(height // self._patch[0] * (width // self._patch[1]), self._mask_ratio, mask_seed)
            arguments["noise"] = noise.to(self._device).expand(len(images), -1)
        return arguments

    def _tokens(self, number: int, image: Image.Image, length: int | None, mask_seed: int) -> list[Patch | None]:
        """The tokens of one image; ``length``: their number, if it is not that of the short run."""
        patches, length = self.crops(*image.size)[0].patches(number, 0), length or self._length
        if self._grids:
            patches = [patches[at] for at in self._grids[0].places.tolist()]
        if self._mask_ratio is not None:
            patches = [patches[place] for place in seen_patches(len(patches), self._mask_ratio, mask_seed)[0]]
        return in_their_place(patches, self._first, length)


def channels_are_first(place: AttentionPlace, record: RunRecord) -> bool:
    """True if the states before an attention's layer are grids ``[B, width, rows, columns]``."""
    shape = record.given(place.first_layer)
    return len(shape) == 4 and shape[1] == place.output_width != shape[3]


def seen_patches(patches: int, mask_ratio: float, seed: int) -> tuple[list[int], Tensor]:
    """The patches that ViT-MAE sees, row by row, and the noise ``[patches]`` that makes it see them in this order.

    The same for every image. The model sees the patches of the least noise. Source: He et al. 2022, section 3.
    """
    drawn = torch.randperm(patches, generator=torch.Generator().manual_seed(seed))
    count = int(patches * (1 - mask_ratio))  # as transformers counts
    drawn[:count] = drawn[:count].sort().values
    return drawn[:count].tolist(), drawn.argsort()


def object_name(number: int) -> str:
    """An object that a detector looks for, for reading."""
    return f"object {number}"


def gray(width: int, height: int) -> Image.Image:
    """An image that shows nothing."""
    return Image.new("RGB", (width, height), (128, 128, 128))


def _rows_of_patches(arguments: dict[str, Tensor]) -> int | None:
    """The rows of patches of each image, if the model takes images as such."""
    pixels = arguments["pixel_values"]
    return pixels.shape[1] if pixels.ndim == 3 else None


@torch.no_grad()
def patch_tokens(
    place: AttentionPlace,
    run: Callable[[dict[str, Tensor]], Any],
    arguments: dict[str, Tensor],
    crop: Crop,
    patch: tuple[int, int],
) -> tuple[int, int]:
    """The number of tokens of a crop, and the one that is its first patch; negative if none is.

    The last patch is the token that its pixels change. ``crop``: the last one of the ``arguments``.
    """
    states, (down, across) = list[Tensor](), patch
    pixels = arguments["pixel_values"].clone()
    if pixels.ndim == 3:  # rows of patches
        pixels[-1, crop.rows * crop.columns - 1] += 1
    else:
        pixels[..., : crop.rows * down, : crop.columns * across][..., -down:, -across:] += 1
    undo = before(place.first_layer, place.batch_first(lambda state: states.append(state.detach().double())))
    try:
        for shown in (arguments["pixel_values"], pixels):
            run(arguments | {"pixel_values": shown})
    finally:
        undo()
    if pixels.ndim == 4 and len(states[0]) != len(pixels):
        raise InvalidCheckpoint.at("checkpoint", "its layers attend over parts of an image, such as those of MobileViT")
    change = (states[1] - states[0])[-1].norm(dim=-1).flatten()  # of a state [B, L, width], or of a grid
    return len(change), int(change.argmax()) + 1 - crop.rows * crop.columns


def patch_size(config: Any) -> tuple[int, int]:
    """Height and width of a model's patches. Raises InvalidCheckpoint for one that has none."""
    size = getattr(config, "patch_stride", None) or getattr(config, "patch_size", None)  # patches of Hiera overlap
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    raise InvalidCheckpoint.at(
        "checkpoint",
        reads_videos(config, config.model_type)
        or f"{config.model_type} has no patch_size: its layers attend over other tokens than patches of one size, such "
        "as places of feature maps that shrink from layer to layer, and these have no names here",
    )


def in_their_place(patches: Sequence[Patch], first: int, length: int) -> list[Patch | None]:
    """The patches among so many tokens; ``first``: the token that is the first of them, if one is."""
    behind = length - first - len(patches)
    return [None] * length if first < 0 or behind < 0 else [*[None] * first, *patches, *[None] * behind]


def token_names(
    row: Sequence[Patch | None], images: int, registers: int, *, crops: bool = False, objects: int = 0
) -> list[str]:
    """The tokens of a crop for reading; ``objects``: the last ones that are no patches, but objects."""
    names, others = [], 0
    for at, patch in enumerate(row):
        if patch is not None:
            names.append(patch_name(patch, images, crops=crops))
            continue
        if (number := at - len(row) + objects) >= 0:
            names.append(object_name(number))
            continue
        name = f"register {others - 1}" if registers else f"token {others}"
        names.append("CLS" if row[0] is None and not others else name)
        others += 1
    return names
