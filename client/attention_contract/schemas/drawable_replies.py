"""The base of replies that can be drawn, by the modules that the entry points ``attention.pictures`` name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Unpack

from attention_contract.base import WireModel
from attention_contract.drawings import drawing_module
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.validation import validate

if TYPE_CHECKING:
    from attention_contract.schemas.costs.sweeps import Sweep


_NAME_ARGUMENTS: Final = {"labels": "keys", "query_labels": "queries", "heads": "heads", "sweep": "sweep"}
"""The arguments of ``plot`` that name what a picture shows, and their fields of ``Names``."""


class DrawableReply(WireModel):
    """A reply with a picture."""

    picture_names: ClassVar[frozenset[str]] = frozenset()
    """Arguments of ``plot`` that its pictures use, but for those of statistics, which show all heads."""

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
        The fields are those of ``PictureOptions``; an unknown one raises InvalidRequest, as does an argument that names
        what this picture does not show.
        """
        options = validate(PictureOptions, dict(fields))
        given: dict[str, Any] = {"labels": labels, "query_labels": query_labels, "heads": heads, "sweep": sweep}
        given = {name: value for name, value in given.items() if value is not None}
        used = self.names_in(options)
        for name in [name for name in given if name not in used]:
            of = f"the view {options.view} of {type(self).__name__}" if options.view else type(self).__name__
            raise InvalidRequest.at(name, f"a picture of {of} shows no {name}; leave it out")
        stated: dict[str, Any] = {_NAME_ARGUMENTS[name]: value for name, value in given.items()}
        stated |= {{"keys": "columns", "queries": "rows"}[name]: None for name in stated.keys() & {"keys", "queries"}}
        names = replace(self.request_names, **stated)
        drawing = drawing_module("figures")
        picture: Picture = drawing.draw(
            self, options, drawing.media_type_of(format), names, drawing.facts_of(self, options)
        )
        return picture

    def names_in(self, options: PictureOptions) -> frozenset[str]:
        """Return the arguments of ``plot`` that a picture with these options uses."""
        return frozenset() if options.view == "statistics" else self.picture_names
