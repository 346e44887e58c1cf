"""Linear probes: a direction in the states of a model, or in statistics of its heads, that tells labelled texts apart.

A probe scores a token by w · x + b, where x ``[d]`` is its feature. Source: Alain & Bengio 2017, Understanding
intermediate layers using linear classifier probes; of statistics of heads: Chuang et al. 2024, Lookback Lens.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_INDICES, VectorId
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import Text
from attention_contract.schemas.recordings import Moment, RecordingId
from attention_contract.schemas.weights import StatisticName
from attention_contract.tensors import Encoding, FloatArray

MAX_SAMPLES: Final = 2**20
"""Tokens, or texts, that a probe is fitted to."""
ProbeId = RecordingId
ProbePoint = Literal["hidden", "output", "mlp", "router", "q", "k", "v", "context"]
ProbeMethod = Literal["logistic", "ridge"]
Label = Annotated[int, Field(ge=0, le=1)]
PositionsOfText = Annotated[list[int], Field(min_length=1, max_length=MAX_INDICES)]


class StateFeature(WireModel):
    """A state of each token."""

    point: ProbePoint
    """``hidden``: the state after the layer, before the final norm. ``output``: what its attention returns.
    ``mlp``: what its MLP adds. ``router``: the weights of its experts. ``q``, ``k``, ``v``, ``context``: those taps of
    all its heads, one behind the other."""
    layer: LayerRef | Literal["all"]
    """``all``: a probe for each layer that reads the text."""


class StatisticFeature(WireModel):
    """Statistics of the attention of each token as a query, of all layers one behind the other."""

    statistics: Listed[StatisticName] = Field(min_length=1, max_length=64)
    """The statistics of each head, as generated tokens have them; none that compares queries."""
    heads: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """The heads of each layer; default: all."""


class VectorFeature(WireModel):
    """The share of the state after a layer along its direction in a steering vector: ⟨x, v⟩ / ‖v‖."""

    vector: VectorId
    layer: LayerRef | Literal["all"] = "all"
    """A layer of the vector. ``all``: a probe for each of them."""


ProbeFeature = StateFeature | StatisticFeature | VectorFeature


class FitProbe(WireModel):
    """Fit a linear probe to labelled texts, or store one that was fitted elsewhere."""

    of: ProbeFeature
    """The feature x of a token: ``{"point", "layer"}``, ``{"statistics", "heads"}``, or ``{"vector", "layer"}``. The
    weights of a probe of a vector are those of ``hidden``, along the vector."""
    texts: Annotated[list[Text], Field(min_length=2, max_length=65_536)] | None = None
    labels: Annotated[list[Label] | list[list[Label]], Field(min_length=2, max_length=65_536)] | None = None
    """0 or 1 for each text; or a list for each text, with one for each of its positions."""
    positions: (
        Literal["last", "mean", "all"] | Annotated[list[int] | list[PositionsOfText], Field(max_length=65_536)]
    ) = "last"
    """The tokens of each text that are samples: the ``last``, ``all``, or those of a list: a position, or several, for
    each text, negative ones counted from the end. ``mean``: one sample, the mean over the tokens."""
    method: ProbeMethod = "logistic"
    """Logistic regression, or ridge regression of the labels −1 and 1; both by scikit-learn, of features scaled to mean
    0 and variance 1."""
    regularization: float = Field(default=1.0, gt=0, le=1e9, allow_inf_nan=False)
    """The weight of ‖w‖²: 1 / ``C`` of ``LogisticRegression``, ``alpha`` of ``RidgeClassifier``."""
    folds: int = Field(default=5, ge=2, le=20)
    """The folds of the cross-validation. Tokens of one text are in one fold."""
    false_positive_rate: float = Field(default=0.05, gt=0, lt=1)
    """The share of samples with label 0 that may score above the ``threshold``."""
    weights: FloatArray | None = None
    """In place of texts: w ``[d]``, of one layer; of a steering vector one number."""
    bias: float | None = Field(default=None, allow_inf_nan=False)
    """With ``weights``: b; default: 0."""
    scale: FloatArray | None = None
    """With ``weights``: the numbers ``[d]`` by which the features were divided, as ``scale_`` of a ``StandardScaler``;
    its ``mean_`` belongs into the bias."""
    wait_s: float | None = Field(default=None, ge=0, le=3600)
    """Seconds to wait for it; the reply then says in ``progress`` how far it is. Default: until it is there. It is
    fitted also if nobody waits, and equal requests share one fit. ``DELETE /v1/probes/{id}`` stops it."""

    @model_validator(mode="after")
    def _one_source(self) -> "FitProbe":
        if (self.texts is None) == (self.weights is None):
            raise at_fault("texts", "expected either texts with labels, or weights")
        if self.texts is None:
            if self.labels is not None:
                raise at_fault("labels", "they go with texts; leave them out beside weights")
            if not isinstance(self.of, StatisticFeature) and self.of.layer == "all":
                raise at_fault("of.layer", "weights are of one layer; name it")
            return self
        for name in ("bias", "scale"):
            if getattr(self, name) is not None:
                raise at_fault(name, "it goes with weights; leave it out beside texts")
        if self.labels is None or len(self.labels) != len(self.texts):
            raise at_fault("labels", f"expected one for each of {len(self.texts)} texts; got {len(self.labels or ())}")
        self._check_positions(self.texts, self.labels)
        return self

    def _check_positions(self, texts: list[str], labels: list[int] | list[list[int]]) -> None:
        positions, by_token = self.positions, isinstance(labels[0], list)
        if isinstance(positions, list) and len(positions) != len(texts):
            raise at_fault("positions", f"expected one entry for each of {len(texts)} texts; got {len(positions)}")
        if by_token and positions in ("last", "mean"):
            raise at_fault(
                "labels", f"positions {positions} gives one sample for each text; expected one label for each"
            )
        if isinstance(positions, list):
            for at, (chosen, own) in enumerate(zip(positions, labels, strict=True)):
                count = len(chosen) if isinstance(chosen, list) else 1
                if isinstance(own, list) and len(own) != count:
                    raise at_fault(
                        f"labels.{at}", f"expected one for each of the {count} positions of the text; got {len(own)}"
                    )
        flat = {label for own in labels for label in (own if isinstance(own, list) else [own])}
        if flat != {0, 1}:
            raise at_fault("labels", f"expected labels of both classes, 0 and 1; got {sorted(flat)} alone")


class ProbeLayer(WireModel):
    """The probe of one layer."""

    layer: LayerRef | None = None
    """Null for statistics of heads."""
    bias: float
    auc: float | None = None
    """The area under the ROC curve of scores that were cross-validated; null of a probe that was fitted elsewhere."""
    auc_low: float | None = None
    auc_high: float | None = None
    """Its interval of 95 %, in which texts, not tokens, count as independent. Source: Newcombe 2006, method 5."""
    threshold: float | None = None
    """The smallest score above which at most ``false_positive_rate`` of the samples with label 0 had their
    cross-validated scores."""


class ProbeFacts(WireModel):
    """The facts of a probe, without its weights."""

    format: Literal[1] = 1
    model: str = Field(min_length=1, max_length=1024)
    """The name of the model."""
    created: Moment
    of: ProbeFeature
    method: ProbeMethod | None = None
    """Null of a probe that was fitted elsewhere."""
    texts: int = 0
    samples: int = 0
    """The tokens, or texts, that it was fitted to."""
    positives: int = 0
    """The samples with label 1."""
    false_positive_rate: float | None = None
    width: int = 0
    """d; 0 of a probe that is being fitted."""
    layer: LayerRef | None = None
    """The layer at which it scores: that with the largest AUC. Null for statistics of heads."""
    layers: list[ProbeLayer] = Field(default_factory=list)


class ProbeInfo(ProbeFacts):
    """A linear probe, or one that is being fitted."""

    id: ProbeId
    state: Literal["fitting", "ready"] = "ready"
    progress: float = 1.0
    """The share that is fitted."""
    bytes: int = 0
    """Bytes of its file."""
    weights: IfRequested[dict[str, FloatArray]] = ABSENT
    """w ``[d]`` by the layer, or by ``statistics``: in the reply to ``GET /v1/probes/{id}``."""


class ProbeList(WireModel):
    """The caller's probes of one model, the newest first."""

    probes: list[ProbeInfo]
    bytes: int
    """Bytes of all probes of the caller on the disk."""
    limit_bytes: int
    """Bytes that the server keeps at most."""


class WatchStop(WireModel):
    """A rule that ends a text."""

    above: float = Field(allow_inf_nan=False)
    """End it with the first token that was chosen by a state with a larger score."""
    after: int = Field(default=0, ge=0, lt=2**31)
    """The number of generated tokens before which it does not end so."""


class Watch(WireModel):
    """A probe that scores tokens while a model reads or generates them."""

    probe: ProbeId
    """Its id; it is of this model: of a state, ``hidden``, ``output``, ``mlp`` or ``router``, of a steering vector, or,
    to watch generations, of statistics of heads."""
    stop: WatchStop | None = None
    """The rule that ends a generated text."""
    prompt: bool = False
    """Also return the scores of the tokens of the prompt, of generations; requests for a pass or for weights score all
    tokens."""


class StopReason(WireModel):
    """The probe that ended a text."""

    probe: ProbeId
    score: float
    token: int
    """The index of the last token among those that were generated, from 0."""


class ProbeScores(WireModel):
    """The scores of tokens by one probe."""

    probe: ProbeId
    scores: FloatArray
    """``[B, L]`` in float64: w · x + b of each token."""


class FeaturesRequest(WireModel):
    """The features of the tokens of one text; asked of a model's process by the server, not over HTTP."""

    text: Text | None = None
    """None to learn their width alone."""
    of: StateFeature | StatisticFeature
    positions: Literal["last", "mean", "all"] | list[int] = "last"
    encoding: Encoding = "base64"


class FeaturesReply(WireModel):
    """The features of some tokens of one text."""

    features: dict[str, FloatArray]
    """``[samples, d]`` by layer, or by ``statistics``."""


EXAMPLE_PROBE: Final[dict[str, Any]] = {
    "of": {"point": "hidden", "layer": 1},
    "texts": ["the cat sat", "the dog sat", "the cat ran", "the dog ran"],
    "labels": [0, 1, 0, 1],
    "folds": 2,
}
