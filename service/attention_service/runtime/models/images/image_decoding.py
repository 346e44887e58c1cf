"""The images of a request: their headers are checked against limits before anything is decoded. Nothing is fetched."""

import binascii
import struct
import warnings
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from PIL import Image, ImageOps

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_complexity import ImageSize
from attention_contract.schemas.prompts import ImageBytes
from attention_service.core.cancellation import checkpoint

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS: Final = 2**25
"""Pixels of all images of a request."""
_BYTES: Final = 32
"""Bytes that decoding and resizing take for each pixel."""
_FAULTS: Final = (
    OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip
"""The errors of Pillow's decoders for what they cannot read."""


def decoding_bytes(images: Sequence[ImageBytes]) -> int:
    """Estimate the memory that the images of a request take until they are of the model's size.

    Raises InvalidRequest for what is no image, and for images that are too large.
    """
    return sum(_BYTES * image.width * image.height for image in _opened(images))


def sized_bytes(images: Sequence[ImageSize]) -> int:
    """Estimate the same of images of these sizes. Raises InvalidRequest for images that are too large."""
    pixels = 0
    for index, image in enumerate(images):
        pixels += image.width * image.height
        _check_pixels(pixels, f"images.{index}", image.width, image.height)
    return _BYTES * pixels


def decoded(images: Sequence[ImageBytes]) -> list[Image.Image]:
    """Decode images as RGB, turned as their EXIF data say. Raises InvalidRequest."""
    return [_decoded(image, f"images.{index}") for index, image in enumerate(_opened(images))]


def _opened(images: Sequence[ImageBytes]) -> list[Image.Image]:
    """Read the headers alone."""
    found, pixels = list[Image.Image](), 0
    for index, each in enumerate(images):
        param = f"images.{index}"
        try:
            content = b64decode(each.base64, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"{param}.base64: expected the bytes of a file in base64", param=param) from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(BytesIO(content), formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_large(param, "more than 100 million") from None
        except _FAULTS:
            raise InvalidRequest(f"{param}: expected a file of {', '.join(FORMATS)}", param=param) from None
        pixels += image.width * image.height
        _check_pixels(pixels, param, image.width, image.height)
        found.append(image)
    return found


def _check_pixels(pixels: int, param: str, width: int, height: int) -> None:
    if pixels > MAX_PIXELS:
        raise _too_large(param, f"{width} × {height}")


def _too_large(param: str, size: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: {size} pixels; the images of a request may have {MAX_PIXELS} in all. Send smaller ones",
        param=param, limit=MAX_PIXELS,
    )  # fmt: skip


def _decoded(image: Image.Image, param: str) -> Image.Image:
    checkpoint()
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except _FAULTS as fault:
        raise InvalidRequest(f"{param}: the file is broken: {str(fault)[:80]}", param=param) from None
