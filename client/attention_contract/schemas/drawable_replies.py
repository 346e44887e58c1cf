"""The base of replies that can be drawn, by the modules that the entry points ``attention.pictures`` name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from attention_contract.base import WireModel
from attention_contract.drawings import drawing_module
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.validation import validate

if TYPE_CHECKING:
    from attention_contract.schemas.costs.sweeps import Sweep


class DrawableReply(WireModel):
    """A reply with a picture."""

    def plot(
        self,
        format: PictureFormat = "svg",  # noqa: A002
        *,
        labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None,
        heads: Sequence[int] | None = None,
        sweep: "Sweep | None" = None,
        **fields: Unpack[PictureFields],
    ) -> Picture:
        """Draw this reply here, as the server draws it. Needs matplotlib: the extra ``plot``.

        ``labels`` of the returned keys and ``query_labels`` of the returned queries, ``heads`` the indices of those
        selected, and the ``sweep`` that costs are along are by default those of the request that this is the reply to.
        The fields are those of ``PictureOptions``; an unknown one raises InvalidRequest.
        """
        options = validate(PictureOptions, dict(fields))
        given: dict[str, Any] = {"keys": labels, "queries": query_labels, "heads": heads, "sweep": sweep}
        stated = {name: value for name, value in given.items() if value is not None}
        stated |= {{"keys": "columns", "queries": "rows"}[name]: None for name in stated.keys() & {"keys", "queries"}}
        names = replace(self.request_names, **stated)
        drawing = drawing_module("figures")
        picture: Picture = drawing.draw(
            self, options, drawing.media_type_of(format), names, drawing.facts_of(self, options)
        )
        return picture
