"""The input of a model that reads text with images: the checkpoint's own processor puts them into one prompt."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.vision_utils import get_vision_window_index

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.models.inputs.images.encoder_inputs import (
    SHORT,
    gray,
    in_their_place,
    patch_size,
    patch_tokens,
    token_names,
)
from attention_service.models.inputs.images.image_decoding import decoded, shortest_edge
from attention_service.models.inputs.input_stacks import Inputs, SizedImage, Stack, Tokens
from attention_service.models.inputs.media_prompts import MediaPrompts, unlike_windows
from attention_service.models.inputs.patch_grids import Crop, Patch, crops_of, patch_name
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.run_records import RunRecord

_MERGES: Final = range(1, 17)
"""Sides of the squares of patches that may become one token."""
ROW_END: Final = "row end"
"""The label of a token that ends a row of patches."""
_OF_TEXT: Final = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Arguments that have a number for each token."""


class PromptInputs(MediaPrompts):
    """Reads the texts and images of one model."""

    medium = "image"
    media = "images"
    one = "an image"

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        """``processor``: the checkpoint's. Raises InvalidCheckpoint for a model without square patches."""
        super().__init__(model, processor)
        self._wanted["return_mm_token_type_ids"] = True
        self.mark = str(processor.image_token)
        self.token = image_tokens(model.config)
        self._places = {self.token, processor.tokenizer.convert_tokens_to_ids(self.mark)}
        """The tokens that stand for parts of images, and that of an image, which is another one in Gemma 3."""
        names = ("vision_start_token_id", "vision_end_token_id")
        around = [getattr(model.config, name, None) for name in names]
        self.before = self.mark
        """An image before a text."""
        if all(isinstance(token_id, int) for token_id in around):
            start, end = processor.tokenizer.convert_ids_to_tokens(around)
            self.before = f"{start}{self.mark}{end}"
        self._vision: Any = model.config.vision_config
        self._patch, self.edge = patch_size(self._vision), shortest_edge(processor.image_processor)
        self.whole = frozenset(getattr(self._vision, "fullatt_block_indexes", None) or ())
        self._pack = _packing(model)
        geometry = partial(processor, text=[self.mark])
        merge = int(getattr(processor.image_processor, "merge_size", 1))
        self.crops = lru_cache(256)(lambda width, height: crops_of(geometry, width, height, self._patch, merge))
        self._length = self._first = 0
        """The tokens of a crop in the layers that see images, and the one that is its first patch."""

    def short_runs(self) -> list[dict[str, Tensor]]:
        """The arguments of a run over a few tokens, and of one over a gray image."""
        return [*super().short_runs(), self._arguments(self.processed(self.mark, [gray(*SHORT)]))]

    def find_parts(
        self, places: Sequence[AttentionPlace], run: Callable[..., Any], record: RunRecord
    ) -> dict[str, str]:
        """Find the tokens that are patches, in the layers that see images. See ``InputReader.find_parts``."""
        arguments, crops = self.short_runs()[-1], self.crops(*SHORT)
        self.packs = "image_grid_thw" in arguments
        if self.packs:
            self._length = sum(crop.rows * crop.columns for crop in crops)
        else:
            self._length, self._first = patch_tokens(places[0], run, arguments, crops[-1], self._patch)
        return unlike_windows(places, self._length)

    def read(self, request: ModelInput) -> Inputs:
        """Read the input of a request. Raises InvalidRequest that names the field at fault."""
        sent = request.all_images
        if not sent:
            return super().read(request)
        if request.all_audio:
            raise InvalidRequest.at("audio", "this model hears none; send text or images")
        images = decoded(sent)
        self.check_alone(request)
        made, tokens, field = self.prompt(request, images)
        self.check(tokens.ids, field, sent=True)
        self._check_apart(tokens.ids, made, field)
        crops = [self.crops(*image.size) for image in images]
        parts = self._parts(tokens.ids, crops, made)
        tiled = any(len(several) > 1 for several in crops)
        shown = [patch_name(part, len(images), crops=tiled) if isinstance(part, Patch) else part for part in parts]
        patches = [part if isinstance(part, Patch) else None for part in parts]
        stack = self.stack(tokens, shown, patches=[patches])
        return Inputs(False, stack, None, self._arguments(made), self._vision_stack(made, crops))

    def sized(self, width: int, height: int) -> SizedImage:
        """Return the tokens of an image of this size: those of a prompt that is this image alone.

        Raises InvalidRequest.
        """
        made = self.processed(self.before, [gray(width, height)], add_special_tokens=False)
        crops, grids = self.crops(width, height), made.get("image_grid_thw")
        text = made["input_ids"].shape[1]
        if grids is None:
            return SizedImage(text, len(crops), self._length)
        windows = self._windows(grids)
        cuts = () if windows is None else tuple(windows[1].diff().tolist())
        return SizedImage(text, 1, sum(crop.rows * crop.columns for crop in crops), cuts)

    def tokens(
        self, text: str, param: str, *, pair: str | None = None, special: bool = True, limit: int | None = None
    ) -> Tokens:
        """The tokens of a text without images. Raises InvalidRequest."""
        tokens = super().tokens(text, param, pair=pair, special=special, limit=limit)
        self.check(tokens.ids, param)
        return tokens

    def of_tokens(self, made: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The arguments that have a number for each token, of tokens as they came."""
        kinds = self._processor.create_mm_token_type_ids([ids])
        every = {
            "input_ids": [ids], "attention_mask": [[1] * len(ids)], "mm_token_type_ids": kinds, "token_type_ids": kinds,
        }  # fmt: skip
        return {name: torch.tensor(every[name]) for name in made if name in _OF_TEXT}

    def _check_apart(self, ids: Sequence[int], made: dict[str, Any], field: str) -> None:
        """Raise InvalidRequest for images side by side, where a model tells them apart by the text between."""
        own = [token_id == self.token for token_id in ids]
        runs = sum(now and not before for before, now in zip([False, *own], own, strict=False))
        if runs < len(made.get("image_grid_thw", ())):
            raise InvalidRequest.at(
                field, "two images follow each other directly; the model needs a token between them"
            )

    def _parts(
        self, ids: Sequence[int], crops: Sequence[Sequence[Crop]], made: dict[str, Any]
    ) -> list[Patch | str | None]:
        """The patch that each token is, or ``ROW_END``; None for other tokens, also of squares that are no patches."""
        parts: list[Patch | str | None] = [None] * len(ids)
        places = [at for at, token_id in enumerate(ids) if token_id == self.token]
        placed: Sequence[Patch | str | None]
        if self._pack is not None and "image_sizes" in made:
            placed = self._packed(self._pack, crops, made["image_sizes"])
        else:
            placed = next((patches for side in _MERGES if len(patches := _merged(crops, side)) == len(places)), [])
        if len(placed) == len(places):
            for at, patch in zip(places, placed, strict=True):
                parts[at] = patch
        return parts

    def _packed(
        self, pack: Callable[..., Any], crops: Sequence[Sequence[Crop]], sizes: Tensor
    ) -> list[Patch | str | None]:
        """The patches in the order in which the model packs them, which is given their numbers in place of features.

        Where it mixes neighbours, since there are too many, a token is no patch. It puts −1 at the ends of rows.
        """
        parts: list[Patch | str | None] = []
        for image, (several, size) in enumerate(zip(crops, sizes, strict=True)):
            patches = [patch for number, crop in enumerate(several) for patch in crop.patches(image, number)]
            numbers = torch.arange(len(patches), dtype=torch.float64).view(len(several), -1, 1)
            row_end = torch.full((1,), -1.0, dtype=torch.float64)
            (packed,), _ = pack([numbers], image_sizes=size[None], image_newline=row_end)
            packed_numbers: list[float] = packed.flatten().tolist()
            mixed = any(number != int(number) for number in packed_numbers)
            known = len(patches) // len(several) if mixed else len(packed_numbers)
            parts += [
                ROW_END if number == -1 else patches[int(number)] if at < known else None
                for at, number in enumerate(packed_numbers)
            ]
        return parts

    def _vision_stack(self, made: dict[str, Any], crops: Sequence[Sequence[Crop]]) -> Stack:
        """The tokens of the layers that see images, in the order in which these have them."""
        numbered = [
            crop.patches(image, number) for image, several in enumerate(crops) for number, crop in enumerate(several)
        ]
        grids = made.get("image_grid_thw")
        if grids is None:
            rows = [in_their_place(patches, self._first, self._length) for patches in numbered]
        else:
            order = self._sequence(grids)
            every = [patch for patches in numbered for patch in patches]
            rows = [[every[at] for at in order]]
        length = len(rows[0])
        ids = torch.arange(length, device=self._device).expand(len(rows), -1)
        tiled = any(len(several) > 1 for several in crops)
        names = [token_names(row, len(crops), 0, crops=tiled) for row in rows]
        return Stack(ids, None, [[None] * length] * len(rows), names, rows)

    def _sequence(self, grids: Tensor) -> list[int]:
        """The patches, counted row by row, in the order of a sequence of merged squares, or of windows of them."""
        merge, first = int(self._vision.spatial_merge_size), 0
        units = []
        for _, rows, columns in grids.tolist():
            number = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge) + first
            units.append(number.transpose(1, 2).reshape(-1, merge * merge))
            first += rows * columns
        sequence = torch.cat(units)
        windows = self._windows(grids)
        order: list[int] = (sequence if windows is None else sequence[windows[0]]).flatten().tolist()
        return order

    def _windows(self, grids: Tensor) -> tuple[Tensor, Tensor] | None:
        """The merged squares in the order of their windows, and the ends of these in patches; None without windows."""
        window = getattr(self._vision, "window_size", None)
        if window is None or not self.whole:
            return None
        find: Any = get_vision_window_index  # has no annotations for what it returns
        order, ends = find(grids, int(self._vision.spatial_merge_size), window, self._patch[0])
        return order, ends


def _packing(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The function by which a model puts the features of an image's crops in order; None without one."""
    pack = getattr(model.base_model, "pack_image_features", None)
    if pack is None:
        return None
    names = ("vision_feature_select_strategy", "vision_aspect_ratio")
    known = {name: getattr(model.config, name) for name in names if name in inspect.signature(pack).parameters}
    return partial(pack, **known)


def _merged(crops: Sequence[Sequence[Crop]], side: int) -> list[Patch | None]:
    """The patches, crop after crop, with squares of so many a side merged."""
    return [
        patch
        for image, several in enumerate(crops)
        for number, crop in enumerate(several)
        for patch in crop.merged(side).patches(image, number)
    ]


def image_tokens(config: Any) -> int | None:
    """The token that stands for parts of images in a text; None of a model that knows none."""
    names = ("image_token_id", "image_token_index")
    return next((token_id for name in names if (token_id := getattr(config, name, None)) is not None), None)
