"""Images of any kind as the contract's: the bytes of their files."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from mimetypes import guess_type
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ImageBytes


class Saved(Protocol):
    """An image of Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None:  # noqa: A002 -- its name there
        """Write the image as a file."""


ImageLike: TypeAlias = ImageBytes | Mapping[str, str] | str | PathLike[str] | bytes | Saved
"""The path of a PNG, JPEG, WebP or GIF file, its bytes, or an image of Pillow."""


def with_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method with its images read. Raises InvalidRequest for one that is none."""
    options = dict(arguments["options"])
    images: Sequence[ImageLike] | None = options.get("images")
    if isinstance(images, str | bytes | PathLike):
        raise InvalidRequest.at("images", "expected a list of images, got one")
    if images is not None:
        options["images"] = [_sent(each, f"images.{index}") for index, each in enumerate(images)]
    return {**arguments, "options": options}


def data_url(path: str, param: str) -> str:
    """Return the file of an image as an address that holds it. Raises InvalidRequest for one that cannot be read."""
    kind, _ = guess_type(path, strict=False)
    return f"data:{kind or 'image/png'};base64,{_sent(path, param)['base64']}"


def _sent(image: Any, param: str) -> Any:
    if isinstance(image, ImageBytes | Mapping):
        return image
    if isinstance(image, str | PathLike):
        try:
            image = Path(image).read_bytes()
        except OSError as fault:
            raise InvalidRequest.at(param, f"{image} cannot be read: {fault.strerror}") from None
    if not isinstance(image, bytes):
        if not hasattr(image, "save"):
            raise InvalidRequest.at(param, f"expected a path, bytes or an image of Pillow, got {image!r:.80}")
        file = BytesIO()
        image.save(file, format="PNG")
        image = file.getvalue()
    return {"base64": b64encode(image).decode()}
