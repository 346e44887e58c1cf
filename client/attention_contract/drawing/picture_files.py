"""Figures as files: SVG, PNG and PDF, with the facts of their making as metadata."""

import io
from collections.abc import Mapping
from typing import Any

import orjson
from matplotlib.figure import Figure

from attention_contract.drawing.figure_style import styled
from attention_contract.drawing.reply_figures import figure_of
from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.wire import PICTURES

SOFTWARE = "attention-service"


def draw(reply: Any, options: PictureOptions, media_type: str, names: Names, facts: Mapping[str, Any]) -> Picture:
    """Draw a reply into a file of a media type of ``PICTURES``.

    The same arguments give the same bytes. ``facts`` are written into its metadata. Raises InvalidRequest as
    ``figure_of`` does.
    """
    with styled(options.theme):
        return Picture(media_type=media_type, data=written(figure_of(reply, options, names), media_type, facts))


def media_type_of(format: str) -> str:  # noqa: A002
    """The media type of a file's ending. Raises InvalidRequest for one that is not drawn."""
    found = {ending: media_type for media_type, ending in PICTURES.items()}.get(format)
    if found is None:
        raise InvalidRequest(f"format: expected one of {', '.join(PICTURES.values())}, got {format!r}", param="format")
    return found


def facts_of(reply: Any, options: PictureOptions) -> dict[str, Any]:
    """The facts that a reply states itself, and the options of its picture."""
    facts: dict[str, Any] = {"options": options.stated(), "software": SOFTWARE}
    ran, weights = getattr(reply, "ran", None), getattr(reply, "weights", None)
    if ran is not None:
        facts |= {"kernel": ran.kernel, "dtype": ran.dtype}
        facts |= {} if ran.version is None else {"version": ran.version}
    if weights is not None:
        facts["shape"] = list(weights.shape)
    return facts | ({} if reply.request_id is None else {"request_id": reply.request_id})


def written(figure: Figure, media_type: str, facts: Mapping[str, Any]) -> bytes:
    """The bytes of a figure's file, with the facts as JSON in its metadata. Call it within ``styled``."""
    ending, drawn = PICTURES[media_type], io.BytesIO()
    figure.savefig(drawn, format=ending, dpi="figure", metadata=_metadata(ending, facts))
    return drawn.getvalue()


def _metadata(ending: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in the entries that the format knows. No date, so that equal pictures have equal bytes."""
    text = orjson.dumps(dict(facts), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
    title = f"Attention of {facts.get('module') or facts.get('recording') or 'a reply'}"
    software = str(facts.get("software", SOFTWARE))
    if ending == "svg":
        identity = {"Identifier": str(facts["request_id"])} if facts.get("request_id") else {}
        return {"Title": title, "Description": text, "Creator": software, "Date": None} | identity
    if ending == "pdf":
        return {"Title": title, "Subject": text, "Creator": software, "CreationDate": None}
    return {"Title": title, "Description": text, "Software": software}
