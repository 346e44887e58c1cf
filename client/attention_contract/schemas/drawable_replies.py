"""The base of replies that can be drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from attention_contract.base import WireModel
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.validation import validate

if TYPE_CHECKING:
    from attention_contract.schemas.complexity import Sweep


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
        title: str = "",
        **fields: Unpack[PictureFields],
    ) -> Picture:
        """Draw this reply here, as the server draws it. Needs matplotlib: the extra ``plot``.

        ``labels`` of the keys and ``query_labels`` of the queries, ``heads`` the indices of those selected. Costs need
        the ``sweep`` of their request. The fields are those of ``PictureOptions``; an unknown one raises
        InvalidRequest.
        """
        from attention_contract import drawing  # noqa: PLC0415 - where the extra is installed

        options = validate(PictureOptions, dict(fields))
        names = drawing.Names(title, labels, query_labels, heads, sweep=sweep)
        return drawing.draw(self, options, drawing.media_type_of(format), names, drawing.facts_of(self, options))
