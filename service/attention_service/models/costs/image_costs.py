"""The cost of images in a whole model: the matrices that see them, as counted in its short run, and their attention."""

import re
from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from attention_contract.schemas.costs.model_complexity import ImageSize, ImageTokens
from attention_service.cost import flops
from attention_service.models.inputs.images.encoder_inputs import SHORT
from attention_service.models.inputs.images.image_decoding import sized_bytes
from attention_service.models.inputs.input_stacks import SizedImage
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace

_LIST: Final = re.compile(r"(?:^|\.)\w+\.\d+\.")
"""The name of a list of layers and the number of one, inside the path of an attention."""


class ImageCosts:
    """Counts what the images of requests to one model cost."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.encodes = loaded.reader.enters == "pixels"
        """True for an encoder of images, all of which is counted here."""
        reads = self.encodes or loaded.reader.media is not None
        every = [*loaded.places.values()]
        self.places = [place for place in every if reads and loaded.reader.sees(place)]
        """The attentions that see images."""
        own = [place for place in every if place not in self.places]
        root = _root_of(loaded.model, own[0]) if reads and own else ""
        head: Any = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.modules: frozenset[nn.Module] = frozenset(
            module
            for path, module in loaded.model.named_modules()
            if reads and module is not head and (self.encodes or (root and not _under(root, path)))
        )
        """The modules that see images, or lead from them to the text."""
        self.parameter_bytes = sum(x.nbytes for module in self.modules for x in module.parameters(recurse=False))
        self._products = sum(count for module, count in loaded.short_products.items() if module in self.modules)

    def sized(self, images: Sequence[ImageSize]) -> list[SizedImage]:
        """Return the tokens of images of these sizes. Raises InvalidRequest."""
        sized, edge = self._loaded.reader.sized, self._loaded.reader.edge
        sized_bytes(images, edge)  # of all together, which is limited
        return [sized(image.width, image.height)._replace(decoding=sized_bytes([image], edge)) for image in images]

    def shape(self, images: Sequence[SizedImage]) -> tuple[int, int]:
        """The crops of images and the tokens of each, as the layers have them that see images."""
        if not images:
            return 0, 0
        if self._loaded.reader.packs:
            return 1, sum(image.length for image in images)
        return sum(image.crops for image in images), max(image.length for image in images)

    def products(self, images: Sequence[SizedImage]) -> int:
        """The FLOPs of all matrix products for these images."""
        if not images:
            return 0
        short, tokens = self._loaded.reader.sized(*SHORT), sum(image.crops * image.length for image in images)
        matrices = self._products * tokens // (short.crops * short.length)
        return matrices + sum(self._attention(place, image) for place in self.places for image in images)

    def _attention(self, place: AttentionPlace, image: SizedImage) -> int:
        if place.windows is not None:
            windows, length = place.windows.order.shape
            return flops(place.bound(windows, length, length), masked=True).matmul
        cut = image.windows and place.number not in self._loaded.reader.whole
        lengths = image.windows if cut else [image.length] * image.crops
        own = {"target": self._loaded.reader.objects}
        return sum(
            flops(place.bound(1, own.get(place.queries or "", n), own.get(place.keys or "", n)), masked=True).matmul
            for n in lengths
        )


def image_tokens(images: Sequence[SizedImage]) -> list[ImageTokens]:
    """Return the tokens of images as part of the reply."""
    return [
        ImageTokens(tokens=image.text, crops=image.crops, vision_tokens=image.crops * image.length) for image in images
    ]


def _root_of(model: nn.Module, place: AttentionPlace) -> str:
    """The path of the text model that an attention is part of; empty if it is the model itself."""
    path = next(path for path, module in model.named_modules() if module is place.module)
    return _LIST.split(path)[0]


def _under(root: str, path: str) -> bool:
    return path == root or path.startswith(f"{root}.")
