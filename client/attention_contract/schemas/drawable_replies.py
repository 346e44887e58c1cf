"""The base of replies that can be drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from attention_contract.base import WireModel
from attention_contract.reply_names import Names
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.validation import validate

if TYPE_CHECKING:
    from attention_contract.schemas.complexity import Sweep


class DrawableReply(WireModel):
    """A reply with a picture."""

    __slots__ = ("_names",)

    @property
    def names(self) -> Names:
        """The names that its request states for what it has numbers of; the client keeps them."""
        return getattr(self, "_names", None) or Names()

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

        ``labels`` of the keys and ``query_labels`` of the queries, ``heads`` the indices of those selected, the
        ``sweep`` that costs are along, and the ``title`` are by default those of the request that this is the reply to.
        The fields are those of ``PictureOptions``; an unknown one raises InvalidRequest.
        """
        from attention_contract import drawing  # noqa: PLC0415 - where the extra is installed

        options = validate(PictureOptions, dict(fields))
        given: dict[str, Any] = {"title": title or None, "keys": labels, "queries": query_labels}
        given |= {"heads": heads, "sweep": sweep}
        names = replace(self.names, **{name: value for name, value in given.items() if value is not None})
        return drawing.draw(self, options, drawing.media_type_of(format), names, drawing.facts_of(self, options))
