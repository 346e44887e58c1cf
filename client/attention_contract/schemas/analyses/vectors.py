"""Steering vectors: a direction in the states of each layer of a model, which edits add while it reads or writes.

Source: Turner et al. 2023, Activation addition; the difference of means: Rimsky et al. 2023, Contrastive activation
addition; the principal component of differences: Zou et al. 2023, Representation engineering, as repeng 0.4 fits it.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, WireModel, at_fault
from attention_contract.schemas.attention import VectorId
from attention_contract.schemas.models import LayerKey, LayerRef
from attention_contract.schemas.prompts import LayersInOrder, Text
from attention_contract.schemas.recordings import Moment
from attention_contract.tensors import Encoding, FloatArray

MAX_VECTOR_TEXTS: Final = 65_536
"""The most texts of one side."""
VectorMethod = Literal["mean_difference", "pca"]
VectorPosition = Literal["last", "mean", "answer"]


class AnsweredText(WireModel):
    """A text and the answer that follows it."""

    text: Text
    answer: Text


VectorTexts = Annotated[list[Text] | list[AnsweredText], Field(min_length=1, max_length=MAX_VECTOR_TEXTS)]
"""Texts of one side; with ``position`` ``answer``, each with its answer."""


class ControlVectorFile(WireModel):
    """A GGUF file of a control vector, as llama.cpp and repeng write it: tensors ``direction.N`` ``[d]``."""

    base64: str = Field(min_length=1, max_length=2**28)


class FitVector(WireModel):
    """Fit a steering vector to texts of two sides, or store one that was made elsewhere."""

    positive: VectorTexts | None = None
    """Texts to which the vector is to lead."""
    negative: VectorTexts | None = None
    """Texts from which it is to lead away."""
    position: VectorPosition = "last"
    """The state of each text: that of its ``last`` token, the ``mean`` over its tokens, or the mean over the tokens of
    its ``answer``."""
    method: VectorMethod = "mean_difference"
    """The mean of the positive states minus that of the negative ones; or ``pca``, the first principal component of the
    differences of pairs, of length 1, with the sign by which most positive states lie ahead of their negative ones."""
    layers: LayersInOrder = "all"
    """The layers behind which states are read; ``all``: those that read the text."""
    directions: Annotated[dict[LayerKey, FloatArray], Field(min_length=1, max_length=4096)] | None = None
    """In place of texts: the direction ``[d]`` of each layer, to be added behind it."""
    gguf: ControlVectorFile | None = None
    """In place of texts: a file of a control vector. ``direction.N`` is that of layer N."""
    wait_s: float | None = Field(default=None, ge=0, le=3600)
    """Seconds to wait for it; the reply then says in ``progress`` how far it is. Default: until it is there. It is
    fitted also if nobody waits, and equal requests share one fit. ``DELETE /v1/vectors/{id}`` stops it."""

    @model_validator(mode="after")
    def _one_source(self) -> "FitVector":
        given = [name for name in ("positive", "directions", "gguf") if getattr(self, name) is not None]
        if self.positive is None and self.negative is not None:
            raise at_fault("positive", "expected texts of both sides; got those of negative alone")
        if len(given) != 1:
            beside = f"; got {' and '.join(given)}" if given else ""
            raise at_fault(
                given[1] if given else "positive", f"expected either texts of two sides, directions or gguf{beside}"
            )
        if self.positive is None:
            for name in ("position", "method", "layers"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise at_fault(name, f"it goes with texts; leave it out beside {given[0]}")
            return self
        if self.negative is None:
            raise at_fault("negative", "expected texts of both sides; got those of positive alone")
        for name, texts in (("positive", self.positive), ("negative", self.negative)):
            answered = isinstance(texts[0], AnsweredText)
            if answered != (self.position == "answer"):
                needs = 'expected {"text", "answer"}, for the position answer' if not answered else "expected texts"
                raise at_fault(f"{name}.0", f"{needs}; or ask for another position")
        if self.method == "pca" and len(self.positive) != len(self.negative):
            raise at_fault(
                "negative",
                f"pca takes pairs: expected {len(self.positive)} texts, as many as positive has; got "
                f"{len(self.negative)}",
            )
        if self.method == "pca" and len(self.positive) < 2:
            raise at_fault("positive", "pca compares differences of pairs: expected at least 2 pairs; got 1")
        return self


class VectorLayer(WireModel):
    """The direction of one layer."""

    layer: LayerRef
    norm: float
    """Its length."""


class VectorFacts(WireModel):
    """The facts of a steering vector, without its directions."""

    format: Literal[1] = 1
    model: str = Field(min_length=1, max_length=1024)
    """The name of the model."""
    checkpoint: str = Field(min_length=1, max_length=1024)
    """The path of the model's checkpoint."""
    checkpoint_created: int
    """The time at which that was written, in seconds since 1970."""
    model_type: str | None = None
    """The kind of model, which GGUF files name too."""
    created: Moment
    source: Literal["texts", "directions", "gguf"]
    method: VectorMethod | None = None
    position: VectorPosition | None = None
    """Null, as ``method`` is, of a vector that was made elsewhere."""
    positive: int = 0
    """The texts to which it leads."""
    negative: int = 0
    """The texts from which it leads away."""
    width: int = 0
    """d; 0 of a vector that is being fitted."""
    layers: list[VectorLayer] = Field(default_factory=list)


class VectorInfo(VectorFacts):
    """A steering vector, or one that is being fitted."""

    id: VectorId
    state: Literal["fitting", "ready"] = "ready"
    progress: float = 1.0
    """The share that is fitted."""
    bytes: int = 0
    """Bytes of its file."""
    directions: IfRequested[dict[str, FloatArray]] = ABSENT
    """The direction ``[d]`` by layer, in float32: in the reply to ``GET /v1/vectors/{id}``."""


class GgufFile(WireModel):
    """A steering vector as a GGUF file."""

    data: bytes = Field(repr=False)


class VectorList(WireModel):
    """The caller's steering vectors of one model, the newest first."""

    vectors: list[VectorInfo]
    bytes: int
    """Bytes of all vectors of the caller on the disk."""
    limit_bytes: int
    """Bytes that the server keeps at most."""


class StatesRequest(WireModel):
    """The states of layers behind one text; asked of a model's process by the server, not over HTTP."""

    text: Text | None = None
    """None to learn the layers and their widths alone."""
    answer: Text | None = None
    position: VectorPosition = "last"
    layers: LayersInOrder = "all"
    encoding: Encoding = "base64"


class StatesReply(WireModel):
    """The states of layers behind one text."""

    states: dict[str, FloatArray]
    """``[d]`` by layer: of the last token, or the mean over tokens."""


EXAMPLE_VECTOR: Final[dict[str, Any]] = {
    "positive": ["I love this.", "What a lovely day."],
    "negative": ["I hate this.", "What an awful day."],
}
