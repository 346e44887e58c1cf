"""Paths between the components of a whole model: what one adds to the residual stream, and what another reads there.

Source: Wang et al. 2022, Interpretability in the wild, path patching; Goldowsky-Dill et al. 2023, Localizing model
behavior with path patching.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_INDICES
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import MAX_TEXTS, Text, TokenIds

SenderPart = Literal["heads", "mlps", "embeddings"]
"""The heads of layers, what layers add beside their attention, and the states before the first layer."""
ReceiverPart = Literal["q", "k", "v", "mlps", "logits"]
"""The queries, keys or values of heads, what layers add beside their attention, and the logits."""
OneOrMoreLayers = LayerRef | Annotated[Listed[LayerRef], Field(min_length=1, max_length=4096)]


def _each_once(name: str, listed: object) -> None:
    if isinstance(listed, list | tuple) and len(set(map(str, listed))) < len(listed):
        raise at_fault(name, "one is listed twice; list each once")


def _heads() -> list[SenderPart]:
    return ["heads"]


class PathSenders(WireModel):
    """The beginnings of paths: components of which one at a time sends another output than it has.

    That output is another text's (``text`` or ``tokens``, as many tokens as the input has), or ``set``; 0 by default.
    """

    parts: Annotated[Listed[SenderPart], Field(min_length=1, max_length=3)] = Field(default_factory=_heads)
    layer: OneOrMoreLayers | None = None
    """The layer of the heads and MLPs, or several; default: those of the request."""
    heads: Annotated[Listed[Index], Field(min_length=1, max_length=MAX_INDICES)] | None = None
    """The heads of these layers; default: all."""
    set: Annotated[float, Field(allow_inf_nan=False)] | Literal["mean"] | None = None
    """The number, or the mean over all tokens of the input, that takes the place of what the component adds to the
    residual stream, in each of its dimensions."""
    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """The text whose run gives the outputs; one for each text of the input, or one for all."""
    tokens: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """The same as token ids; no special tokens are added."""

    @model_validator(mode="after")
    def _one_change(self) -> "PathSenders":
        given = [name for name in ("text", "tokens", "set") if getattr(self, name) is not None]
        if len(given) > 1:
            raise at_fault(given[1], f"expected one of text, tokens and set; got {' and '.join(given)}")
        for name in ("parts", "layer", "heads"):
            _each_once(name, getattr(self, name))
        if self.heads is not None and "heads" not in self.parts:
            raise at_fault("heads", "they go with the part heads; add it to parts")
        if self.layer is not None and [*self.parts] == ["embeddings"]:
            raise at_fault("layer", "embeddings have none; leave it out")
        return self


class PathReceivers(WireModel):
    """The ends of paths: components of which one at a time reads the changed states; the rest of the run follows."""

    parts: Annotated[Listed[ReceiverPart], Field(min_length=1, max_length=5)] | None = None
    """Default: ``q``, ``k`` and ``v`` if ``layer`` or ``heads`` are given, else ``logits``."""
    layer: OneOrMoreLayers | None = None
    """The layer of the heads and MLPs, or several; default: those of the request."""
    heads: Annotated[Listed[Index], Field(min_length=1, max_length=MAX_INDICES)] | None = None
    """The heads of these layers; of ``k`` and ``v`` these are key/value heads. Default: all."""

    @model_validator(mode="after")
    def _fits(self) -> "PathReceivers":
        for name in ("parts", "layer", "heads"):
            _each_once(name, getattr(self, name))
        parts = {*self.named_parts}
        if self.heads is not None and not parts & {"q", "k", "v"}:
            raise at_fault("heads", "they go with the parts q, k and v; add one to parts")
        if self.layer is not None and parts == {"logits"}:
            raise at_fault("layer", "logits have none; leave it out")
        return self

    @property
    def named_parts(self) -> list[ReceiverPart]:
        """The parts, by default too."""
        if self.parts is not None:
            return [*self.parts]
        return ["logits"] if self.layer is None and self.heads is None else ["q", "k", "v"]


class PathEnd(WireModel):
    """One component at the beginning or the end of paths."""

    part: SenderPart | ReceiverPart
    layer: IfRequested[LayerRef] = ABSENT
    """Absent for ``embeddings`` and ``logits``."""
    head: IfRequested[int] = ABSENT
    """The number of the head, or of the key/value head of ``k`` and ``v``."""

    @property
    def name(self) -> str:
        """The component in a few letters, as in ``0.3``, ``1.2 q``, ``mlp 4``, ``logits``."""
        if self.layer is ABSENT or self.layer is None:
            return self.part
        if self.head is ABSENT or self.head is None:
            return f"mlp {self.layer}"
        return f"{self.layer}.{self.head}" if self.part == "heads" else f"{self.layer}.{self.head} {self.part}"

    def __str__(self) -> str:
        return self.name
