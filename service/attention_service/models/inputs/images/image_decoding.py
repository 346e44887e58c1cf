"""The images of a request: their headers are checked against limits before anything is decoded. Nothing is fetched."""

import struct
import warnings
from collections.abc import Sequence
from typing import Any, Final

from PIL import Image, ImageOps

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ImageSize
from attention_contract.schemas.prompts import ImageBytes
from attention_service.core.cancellation import checkpoint
from attention_service.models.inputs.file_bytes import file_of

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS: Final = 2**25
"""Pixels of all images of a request."""
_DECODING_BYTES: Final = 32
"""Bytes that decoding and resizing take for each pixel."""
_BYTES_OF_SIDES: Final = 64
"""The same for each pixel of width and height: Pillow's pointers to rows, and its weights for resizing."""
_PIXELS_A_BYTE: Final = {"PNG": 2**14, "GIF": 2**12}
"""More pixels than a byte of a file stands for, by the format. Deflate makes at most 1,032 bytes of a byte, of 8 pixels
each, and a code of LZW stands for at most 4,096 pixels. One of JPEG or WEBP may stand for any number."""
_FAULTS: Final = (
    OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip
"""The errors of Pillow's decoders for what they cannot read."""


def shortest_edge(processor: Any) -> int:
    """Pixels to which an image processor resizes the shorter side, whatever becomes of the longer; 0 if it has a limit.

    ``processor``: of transformers.
    """
    size = processor.size  # None if it counts patches
    return 0 if size is None or size.longest_edge else int(size.shortest_edge or 0)


def decoding_bytes(images: Sequence[ImageBytes], edge: int = 0) -> int:
    """Estimate the memory that the images of a request take until they are of the model's size.

    ``edge``: the ``shortest_edge`` of the model's processor. Raises InvalidRequest for what is no image, and for images
    that are too large.
    """
    return sized_bytes(_opened(images), edge)


def sized_bytes(images: Sequence[ImageSize | Image.Image], edge: int = 0) -> int:
    """Estimate the same of images of these sizes. Raises InvalidRequest for images that are too large."""
    pixels = sides = 0
    for index, image in enumerate(images):
        own = image.width * image.height
        resized = edge * edge * max(image.width, image.height) // min(image.width, image.height)
        pixels += max(own, resized)
        sides += image.width + image.height
        if pixels > MAX_PIXELS:
            more = f", {resized} once its shorter side is resized to {edge}" if resized > own else ""
            raise _too_large(f"images.{index}", f"{image.width} × {image.height} pixels{more}")
    return _DECODING_BYTES * pixels + _BYTES_OF_SIDES * sides


def decoded(images: Sequence[ImageBytes]) -> list[Image.Image]:
    """Decode images as RGB, turned as their EXIF data say. Raises InvalidRequest."""
    opened = _opened(images)
    sized_bytes(opened)
    return [_decoded(image, f"images.{index}") for index, image in enumerate(opened)]


def _opened(images: Sequence[ImageBytes]) -> list[Image.Image]:
    """Read the headers alone."""
    opened = list[Image.Image]()
    for index, encoded in enumerate(images):
        param = f"images.{index}"
        content = file_of(encoded.base64, param)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(content, formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_large(param, "more than 100 million pixels") from None
        except _FAULTS:
            raise InvalidRequest.at(param, f"expected a file of {', '.join(FORMATS)}") from None
        size, most = len(content.getbuffer()), _PIXELS_A_BYTE.get(str(image.format))
        if most is not None and image.width * image.height > size * most:
            raise InvalidRequest.at(
                param,
                f"the file is broken: its header says {image.width} × {image.height} pixels, more than its {size} "
                f"bytes can hold as {image.format}",
            )
        opened.append(image)
    return opened


def _too_large(param: str, size: str) -> InvalidRequest:
    return InvalidRequest.at(
        param, f"{size}; the images of a request may have {MAX_PIXELS} in all. Send smaller ones", limit=MAX_PIXELS
    )


def _decoded(image: Image.Image, param: str) -> Image.Image:
    checkpoint()
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except _FAULTS as fault:
        raise InvalidRequest.at(param, f"the file is broken: {str(fault)[:80]}") from None
