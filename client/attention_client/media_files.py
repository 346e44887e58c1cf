"""Images and sounds of any kind as the contract's: the bytes of their files."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from mimetypes import guess_type
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import AudioBytes, ImageBytes


class Saved(Protocol):
    """An image of Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None:  # noqa: A002 -- its name there
        """Write the image as a file."""


ImageLike: TypeAlias = ImageBytes | Mapping[str, str] | str | PathLike[str] | bytes | Saved
"""The path of a PNG, JPEG, WebP or GIF file, its bytes, or an image of Pillow."""
AudioLike: TypeAlias = AudioBytes | Mapping[str, str] | str | PathLike[str] | bytes
"""The path of a WAV, FLAC, OGG or MP3 file, or its bytes."""


def with_media(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method with its images and sounds read. Raises InvalidRequest for one that is none."""
    options = dict(arguments["options"])
    for field, kind in (("images", "images"), ("audio", "sounds")):
        given: Sequence[ImageLike | AudioLike] | None = options.get(field)
        if isinstance(given, str | bytes | PathLike):
            raise InvalidRequest.at(field, f"expected a list of {kind}, got one")
        if given is not None:
            takes_pillow = field == "images"
            options[field] = [sent(medium, f"{field}.{at}", image=takes_pillow) for at, medium in enumerate(given)]
    return {**arguments, "options": options}


def image_pairs(pairs: Sequence[Sequence[str | ImageLike]]) -> list[list[Any]]:
    """Return pairs of texts and images with the images read. Raises InvalidRequest for one that is none."""
    return [
        [
            side if isinstance(side, str) else sent(side, f"pairs.{index}.{number}", image=True)
            for number, side in enumerate(pair)
        ]
        for index, pair in enumerate(pairs)
    ]


def data_url(path: str, param: str) -> str:
    """Return the file of an image as an address that holds it. Raises InvalidRequest for one that cannot be read."""
    kind, _ = guess_type(path, strict=False)
    return f"data:{kind or 'image/png'};base64,{sent(path, param, image=True)['base64']}"


def sent(given: Any, param: str, *, image: bool) -> Any:
    """Return an image or a sound as a request has it. Raises InvalidRequest for one that cannot be read."""
    if isinstance(given, ImageBytes | AudioBytes | Mapping):
        return given
    if isinstance(given, str | PathLike):
        try:
            given = Path(given).read_bytes()
        except OSError as fault:
            raise InvalidRequest.at(param, f"{given} cannot be read: {fault.strerror}") from None
    if not isinstance(given, bytes):
        if not image or not hasattr(given, "save"):
            more = " or an image of Pillow" if image else ""
            raise InvalidRequest.at(param, f"expected a path, bytes{more}, got {given!r:.80}")
        file = BytesIO()
        given.save(file, format="PNG")
        given = file.getvalue()
    return {"base64": b64encode(given).decode()}
