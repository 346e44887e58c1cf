"""Figures as files: SVG, PNG and PDF, with the facts of their making as metadata."""

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.wire import PICTURES
from attention_pictures.figure_style import styled
from attention_pictures.pooled_cells import Numbers
from attention_pictures.reply_figures import figure_of, layers_figure
from attention_pictures.text_sizes import font_type_of_pdf, missing_characters

SOFTWARE = "attention-service"
MOST_PIXELS: Final = 2**24
"""Pixels of one picture."""
_PIXEL_BYTES: Final = 48
"""Memory of a pixel while a PNG is drawn: images are scaled in float64, and then coloured. Measured with matplotlib
3.11: up to 43 bytes."""


def draw(reply: Any, options: PictureOptions, media_type: str, names: Names, facts: Mapping[str, Any]) -> Picture:
    """Draw a reply into a file of a media type of ``PICTURES``.

    The same arguments give the same bytes. ``facts`` are written into its metadata. Raises InvalidRequest as
    ``figure_of`` does.
    """
    return save(make_figure(reply, options, names), options, media_type, facts)


def draw_layers(
    layers: Sequence[tuple[str, Mapping[str, Numbers]]], title: str, options: PictureOptions, media_type: str,
    facts: Mapping[str, Any],
) -> Picture:  # fmt: skip
    """Draw layers × heads of statistics ``[H]`` by the names of the layers. Raises InvalidRequest for another view."""
    if options.view not in {None, "statistics"}:
        raise InvalidRequest.at("view", f"statistics of many texts have no view {options.view}; leave it out")
    with styled(options.theme):
        figure = layers_figure(layers, None, options, title)
    return save(figure, options, media_type, {"options": options.stated(), "software": SOFTWARE, **facts})


def make_figure(reply: Any, options: PictureOptions, names: Names) -> Figure:
    """Draw a reply into a figure, to be saved. Raises InvalidRequest as ``figure_of`` does."""
    with styled(options.theme):
        return figure_of(reply, options, names)


def save(figure: Figure, options: PictureOptions, media_type: str, facts: Mapping[str, Any]) -> Picture:
    """Write a figure into a file of a media type of ``PICTURES``, with the facts as JSON in its metadata.

    Warns of characters that no font of this machine has: a PNG or PDF shows boxes for them.
    """
    ending, file = PICTURES[media_type], io.BytesIO()
    texts = [label.get_text().replace("\n", "") for label in figure.findobj(Text)]
    if ending != "svg" and (missing := missing_characters(texts)):
        warning = (
            f"no font here has {missing[:20]!r}; the picture has boxes instead. Install one, such as Noto Sans CJK"
        )
        warnings.warn(warning, stacklevel=2)
    with styled(options.theme), rc_context({"pdf.fonttype": font_type_of_pdf(texts)}):
        clear = options.background == "none"
        figure.savefig(file, format=ending, dpi="figure", metadata=_metadata(ending, facts), transparent=clear)
    return Picture(media_type=media_type, data=file.getvalue())


def saving_bytes(figure: Figure, media_type: str) -> int:
    """Estimate the memory of ``save``. Raises InvalidRequest for a picture of more than ``MOST_PIXELS``."""
    if PICTURES[media_type] != "png":
        return 0
    width, height = (int(side * figure.dpi) for side in figure.get_size_inches())
    if width * height > MOST_PIXELS:
        raise InvalidRequest.at(
            "dpi",
            f"the picture would have {width} × {height} pixels; a PNG has at most {MOST_PIXELS} together. Lower dpi "
            "or width, or ask for SVG or PDF",
            limit=MOST_PIXELS,
            actual=width * height,
        )
    return _PIXEL_BYTES * width * height


def media_type_of(format: str) -> str:  # noqa: A002
    """The media type of a file's ending. Raises InvalidRequest for one that is not drawn."""
    media_type = {ending: kind for kind, ending in PICTURES.items()}.get(format)
    if media_type is None:
        raise InvalidRequest.at("format", f"expected one of {', '.join(PICTURES.values())}, got {format!r}")
    return media_type


def facts_of(reply: Any, options: PictureOptions) -> dict[str, Any]:
    """The facts that a reply states itself, and the options of its picture."""
    facts: dict[str, Any] = {"options": options.stated(), "software": SOFTWARE}
    ran, weights = getattr(reply, "ran", None), getattr(reply, "weights", None)
    if ran is not None:
        facts["dtype"] = ran.dtype
        facts |= {name: getattr(ran, name) for name in ("kernel", "version", "model") if getattr(ran, name, None)}
    if weights is not None:
        facts["shape"] = list(weights.shape)
    return facts | ({} if reply.request_id is None else {"request_id": reply.request_id})


def _metadata(ending: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in the entries that the format knows. No date, so that equal pictures have equal bytes."""
    text = orjson.dumps(dict(facts), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
    title = f"Attention of {facts.get('module') or facts.get('model') or facts.get('recording') or 'a reply'}"
    software = str(facts.get("software", SOFTWARE))
    if ending == "svg":
        identity = {"Identifier": str(facts["request_id"])} if facts.get("request_id") else {}
        return {"Title": title, "Description": text, "Creator": software, "Date": None} | identity
    if ending == "pdf":
        return {"Title": title, "Subject": text, "Creator": software, "CreationDate": None}
    return {"Title": title, "Description": text, "Software": software}
