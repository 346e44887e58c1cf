"""Lenses: the next tokens that a state inside a whole model would predict if it were read out at once.

Notation as in ``model_requests``; P positions that are read, T targets, N layers of the reply. Without a list of texts
the dimension B is missing.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import TextLabels
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import ModelInput, ModelReply, Text
from attention_contract.schemas.recordings import Moment, RecordingId
from attention_contract.schemas.text_positions import TokenPositions
from attention_contract.tensors import Encoding, FloatArray, IntArray

MAX_READ: Final = 2**18
"""Tokens that a reply names: readings · (1 + ``top_k``)."""
LensKind = Literal["logit", "jacobian"]
LensPart = Literal["hidden", "output", "heads"]
LensId = RecordingId
LayerNumber = Annotated[str, Field(pattern=r"^\d{1,4}$")]
TargetToken = Index | Annotated[str, Field(min_length=1, max_length=1024)]


def of_hidden() -> list[LensPart]:
    """The parts that a request reads by default."""
    return ["hidden"]


class ModelLensRequest(TextLabels, ModelInput):
    """Read out the states inside a model that predicts tokens of a text.

    The labels take the place of the tokens in a picture of the reply; of an encoder-decoder model, of the decoder's.
    """

    kind: LensKind = "logit"
    """``logit``: by the model's own final norm and unembedding, or its whole head. ``jacobian``: first by the mean
    Jacobian of the last layer's states by those of the layer, which ``lens`` names. Sources: nostalgebraist 2020;
    Gurnee et al. 2026."""
    lens: LensId | None = None
    """The id of a fitted lens, for the kind ``jacobian``."""
    of: Listed[LensPart] = Field(default_factory=of_hidden, min_length=1, max_length=3)
    """``hidden``: the states after each layer. ``output``: what its attention adds to them. ``heads``: what each head
    adds. The last two are contributions to the logits: the scale of the final norm is held at that of the run."""
    positions: TokenPositions | None = None
    """The positions of the tokens to read, counted within each text, negative ones from its end; default: all. A list
    of lists has one for each text, all of the same length."""
    top_k: int = Field(default=5, ge=0, le=1024)
    """The number of largest logits to return for each reading; 0 for none."""
    targets: Listed[TargetToken] = Field(default_factory=list, max_length=256)
    """Tokens whose logits every reading tells: ids, or texts that are one token. The difference of two targets is that
    of their logits."""

    @model_validator(mode="after")
    def _one_kind(self) -> "ModelLensRequest":
        if self.kind == "jacobian" and self.lens is None:
            raise at_fault("lens", "expected the id of a fitted lens; GET /v1/models/{model}/lenses lists them")
        if self.kind == "logit" and self.lens is not None:
            raise at_fault("lens", "it goes with the kind jacobian; leave one of them out")
        if not self.top_k and not self.targets:
            raise at_fault("top_k", "expected at least 1, or targets: there is nothing to return")
        return self


class LensTop(WireModel):
    """The tokens with the largest logits of each reading, the largest first."""

    ids: IntArray
    """``[B, P, k]``; of heads ``[B, H, P, k]``. ``names`` of the reply has their texts."""
    logits: FloatArray
    probabilities: IfRequested[FloatArray] = ABSENT
    """Present for ``hidden``, whose logits are those of a prediction."""


class LensReading(WireModel):
    """The reading of one part of a layer."""

    top: IfRequested[LensTop] = ABSENT
    targets: IfRequested[FloatArray] = ABSENT
    """``[B, P, T]``; of heads ``[B, H, P, T]``: the logits of the targets, or the contributions to them."""


class LayerLens(WireModel):
    """The readings of one layer."""

    layer: LayerRef
    hidden: IfRequested[LensReading] = ABSENT
    output: IfRequested[LensReading] = ABSENT
    heads: IfRequested[LensReading] = ABSENT


class LensRest(WireModel):
    """The parts of the logits of the targets beside the heads of the layers in the reply.

    The logit of a target = ``embeddings`` + Σ over layers of (Σ heads + ``biases`` + ``mlps``) + ``others`` +
    ``unembedding``; ``output`` of a layer is Σ heads + ``biases``.
    """

    embeddings: FloatArray
    """``[B, P, T]``: the input of the first layer."""
    mlps: FloatArray
    """``[B, N, P, T]``: what the layer adds beside its attention; of one with two attentions, at the first of them."""
    biases: IfRequested[FloatArray] = ABSENT
    """``[B, N, P, T]``, with ``heads``: what the attention adds beside its heads: the bias of its output projection."""
    others: FloatArray
    """``[B, P, T]``: what layers add that are not in the reply."""
    unembedding: FloatArray
    """``[T]``: the biases of the final norm and of the unembedding."""


class ModelLensReply(ModelReply, DrawableReply):
    """The readings of states inside a model."""

    picture_names: ClassVar = frozenset({"labels"})

    kind: LensKind
    lens: IfRequested[LensId] = ABSENT
    positions: list[int] | list[list[int]]
    """The indices in ``labels`` of the tokens that are read; of several texts a list for each."""
    names: dict[str, str]
    """The text of each token id in the reply, those of targets too."""
    targets: list[int] = Field(default_factory=list)
    """The ids of the targets."""
    logits: IfRequested[FloatArray] = ABSENT
    """``[B, P, T]``: the logits of the targets in the run itself, before a cap of the logits if the model has one;
    with targets and contributions of the kind ``logit``."""
    layers: list[LayerLens]
    """The layers in the order asked."""
    rest: IfRequested[LensRest] = ABSENT
    """With targets and contributions of the kind ``logit``."""

    def name(self, token: int) -> str:
        """Return the text of a token id of the reply. Raises KeyError."""
        return self.names[str(token)]


# ── fitted lenses ────────────────────────────────────────────────────────────────────────────────────────────────────


class FitLens(WireModel):
    """Fit a Jacobian lens to a model over texts, or store one that was fitted elsewhere."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=4096)] | None = None
    """The texts whose Jacobians are averaged."""
    skip_first: int = Field(default=16, ge=0, lt=2**31)
    """The first tokens of each text that are left out; the last is left out too. 16, as in the published lenses."""
    max_tokens: int = Field(default=128, ge=2, lt=2**31)
    """The tokens of each text that are read."""
    jacobians: dict[LayerNumber, FloatArray] | None = None
    """In place of texts: the matrix ``[d_model, d_model]`` of each layer but the last, by the layer's number. It maps
    the states after the layer to the states after the last one."""
    wait_s: float | None = Field(default=None, ge=0, le=3600)
    """Seconds to wait for it; the reply then says in ``progress`` how far it is. Default: until it is there. It is
    fitted also if nobody waits, and equal requests share one fit. ``DELETE /v1/lenses/{id}`` stops it."""

    @model_validator(mode="after")
    def _one_source(self) -> "FitLens":
        if (self.texts is None) == (self.jacobians is None):
            raise at_fault("texts", "expected either texts or jacobians")
        if self.max_tokens < self.skip_first + 2:
            raise at_fault("max_tokens", "expected at least skip_first + 2, so that a token is left")
        return self


class LensFacts(WireModel):
    """The facts of a lens, without its matrices."""

    format: Literal[1] = 1
    model: str = Field(min_length=1, max_length=1024)
    """The name of the model."""
    created: Moment
    texts: int = 0
    """The number of texts that were averaged; 0 if that is not known."""
    skip_first: int | None = None
    max_tokens: int | None = None
    width: int = 0
    """d_model; 0 of a lens that is being fitted."""
    layers: list[int] = Field(default_factory=list)
    """The numbers of the layers that have a matrix."""


class LensMatrices(LensFacts):
    """A fitted lens with its matrices, as its safetensors file holds them."""

    file_entry: ClassVar = "lens"
    """The metadata entry of the file."""

    jacobians: dict[LayerNumber, FloatArray] = Field(default_factory=dict)
    """``[d_model, d_model]`` by the number of the layer; those that ``fit_lens`` takes."""


class LensInfo(LensFacts):
    """A fitted lens, or one that is being fitted."""

    id: LensId
    state: Literal["fitting", "ready"] = "ready"
    progress: float = 1.0
    """The share that is fitted."""
    bytes: int = 0
    """Bytes of its file."""


class LensList(WireModel):
    """The caller's lenses of one model, the newest first."""

    lenses: list[LensInfo]
    bytes: int
    """Bytes of all lenses of the caller on the disk."""
    limit_bytes: int
    """Bytes that the server keeps at most."""


class JacobianRequest(WireModel):
    """Some rows of the Jacobians of one text; asked of a model's process by the server, not over HTTP."""

    text: Text
    skip_first: int
    max_tokens: int
    start: int = Field(ge=0)
    """The first row."""
    encoding: Encoding = "base64"


class JacobianReply(WireModel):
    """Rows of the Jacobians of one text."""

    rows: FloatArray
    """``[N − 1, rows, d_model]``: of each layer but the last, the mean over its tokens."""
    width: int
    """d_model"""
