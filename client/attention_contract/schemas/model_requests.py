"""Requests to whole models and their replies: predictions, weights and gradients of a text.

Notation as in ``attention``; V is the size of the vocabulary.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.arrow_tables import TableRows
from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.analyses.integrated_gradients import IntegratedCompleteness, IntegratedGradients
from attention_contract.schemas.analyses.probes import ProbeScores, Watch
from attention_contract.schemas.attention import MAX_TAPS, Select, Taps, TokenLabels, WeightsSelect
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.gradients import GradientCheck
from attention_contract.schemas.models import LayerRef, LayerTap
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.prompts import MAX_TEXTS, ModelInput, ModelReply, Text
from attention_contract.schemas.text_positions import TokenPositions, position_count
from attention_contract.schemas.weights import (
    BY_KEY,
    CandidatesByText,
    ClassName,
    HeadStatistics,
    Normalization,
    PairsByText,
    StatisticName,
    TopKeys,
    WeightsDifferences,
    check_narrowing,
)
from attention_contract.tensors import AnyNumber, BoolArray, FloatArray, IntArray

MAX_PREDICTED: Final = 16_384
"""Predictions and tokens named in them, of all texts of a request."""
ModelTap = LayerTap | Literal["embeddings", "logits", "pooled"]
_OF_ALL: Final = frozenset({"logits", "pooled", "tokens", "embeddings"})
"""Returned tensors that no layer has."""
_WHOLE_TAPS: Final = _OF_ALL | {"hidden", "mlp", "router", "output"}
"""Returned tensors that ``select`` does not narrow."""


def check_read_alone(watches: Sequence[Watch]) -> None:
    """Raise an error of validation for what a watch says about generated tokens, where texts are read alone."""
    for at, watch in enumerate(watches):
        for name in ("stop", "prompt"):
            if getattr(watch, name):
                raise at_fault(f"watch.{at}.{name}", "nothing is generated here; leave it out")


class ModelForwardRequest(ModelInput):
    """Run a whole model, and return its predictions and any taps of any layers."""

    return_: Listed[ModelTap] = Field(default_factory=list, alias="return", max_length=MAX_TAPS)
    """Taps of the attention of each layer, as ``taps`` of the layers of a model names them; ``mlp``, what the MLP of
    each layer adds; ``router``, the weights of its experts; ``hidden``, the output of each layer; ``embeddings`` of the
    model; ``logits``, for all tokens of the vocabulary; ``pooled``, one vector for each image."""
    select: Select | None = None
    """The heads and queries of those taps, but for ``output``, ``mlp``, ``router``, ``hidden``, ``embeddings``,
    ``logits`` and ``pooled``; default: all."""
    positions: TokenPositions | None = None
    """The positions of the tokens whose predictions are returned, counted within each text, negative ones from its end;
    default: the last; of a model that classifies tokens all, and of one that finds an answer in a text the likeliest
    first and last token of it. A list of lists has one for each text, all of the same length. At most 16,384
    predictions and tokens named in them: texts · positions · (1 + ``top_k``)."""
    top_k: int = Field(default=5, ge=0, le=1024)
    """The number of most likely tokens to return for each prediction; 0 for none."""
    average_heads: bool = False
    """Return ``weights`` averaged over the (selected) heads, without the head dimension."""
    compare: Literal["unedited", "base"] | None = None
    """``unedited``: also run the model without the edits. ``base``, of a model with an adapter: also run its base,
    with the same edits. Predictions show both runs, and ``divergence`` compares them."""
    watch: Listed[Watch] = Field(default_factory=list, max_length=16)
    """Linear probes that score every token."""
    keep: bool = False
    """Store the run as a recording: weights, the returned taps from ``q`` to ``output``, and hidden states."""
    likelihood: Literal["masked"] | None = None
    """``masked``, of a masked model: mask each token of each text in turn, but for special tokens, and return
    ``likelihood`` in place of predictions."""

    @model_validator(mode="after")
    def _likelihood_alone(self) -> "ModelForwardRequest":
        if self.likelihood is None:
            return self
        default = type(self).model_fields["top_k"].default
        given = {"return": self.return_, "positions": self.positions, "compare": self.compare, "keep": self.keep}
        for name, value in (given | {"answer": self.answer, "top_k": self.top_k not in {0, default}}).items():
            if value:
                raise at_fault(
                    name, "a likelihood is made by many passes, and nothing else of them is told; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _narrows_something(self) -> "ModelForwardRequest":
        if self.average_heads and "weights" not in self.return_:
            raise at_fault("average_heads", "it averages returned weights; add weights to return, or leave it out")
        if self.select is not None and _WHOLE_TAPS.issuperset(self.return_):
            raise at_fault(
                "select", "it narrows taps of attentions; name some in return, such as weights, or leave it out"
            )
        if self.layers != "all" and not self.keep and _OF_ALL.issuperset(self.return_):
            raise at_fault(
                "layers", "the reply has no layers; name taps in return, such as weights or hidden, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _watches_alone(self) -> "ModelForwardRequest":
        if self.watch and self.likelihood is not None:
            raise at_fault("watch", "likelihoods are of masked copies of a text; leave it out")
        check_read_alone(self.watch)
        return self

    @model_validator(mode="after")
    def _few_predictions(self) -> "ModelForwardRequest":
        positions = position_count(self.positions) or 1
        if (count := self.inputs * positions * (1 + self.top_k)) > MAX_PREDICTED:
            raise at_fault(
                "top_k" if self.positions is None else "positions",
                f"expected at most {MAX_PREDICTED} predictions and tokens named in them; got {count}: {self.inputs} "
                f"texts, {positions} positions, 1 + {self.top_k} tokens. Ask in parts, or with a smaller top_k",
            )
        return self


class NamedSpan(WireModel):
    """A part of a text by its place: messages, characters or tokens, of which it has exactly one.

    Its tokens are those whose last character is in it. Layers whose keys are no tokens of the text have none of them.
    """

    name: ClassName
    messages: Annotated[Listed[Index], Field(min_length=1, max_length=1024)] | None = None
    """Indices of messages, counted from 0: the tokens of their contents."""
    characters: tuple[Index, Index] | None = None
    """First and last (exclusive) character of the text, or of the conversation as the chat template writes it."""
    tokens: tuple[Index, Index] | None = None
    """First and last (exclusive) token, special ones included and padding left out."""

    @model_validator(mode="after")
    def _one_place(self) -> "NamedSpan":
        given = [name for name in ("messages", "characters", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise at_fault(given[1] if given else "messages", "expected one of messages, characters and tokens")
        for name in ("characters", "tokens"):
            if (ends := getattr(self, name)) is not None and ends[0] >= ends[1]:
                raise at_fault(name, f"expected a first before a last; got {ends[0]} and {ends[1]}")
        return self


class TokenStatisticOptions(WireModel):
    """Options of the statistics of generated tokens. Token ids are those of the text."""

    window: int = Field(default=8, ge=0, lt=2**31)
    """Tokens to each side that ``locality`` counts."""
    sinks: int = Field(default=1, ge=0, lt=2**31)
    """First keys that ``sink_share`` counts."""
    token_classes: dict[ClassName, Listed[int]] = Field(default_factory=dict, max_length=64)
    """Token ids by name: the class has the keys with one of these tokens."""
    spans: Listed[NamedSpan] = Field(default_factory=list, max_length=64)
    """Parts of each text by their places: ``classes`` has the share of each. Of a generation, parts of the prompt."""
    pairs: PairsByText | None = None
    """The ``[query, key]`` of ``pairs``: a list for each text, or one list for all. They count the tokens of a text
    from 0, special ones included and padding left out. Queries are those of the layer, of a cross-attention the
    decoder's, and keys those of the layer, of a cross-attention the encoder's. Of a generation, queries are those that
    choose its tokens: the last token of the prompt, and those of the answer but the last."""
    candidates: CandidatesByText | None = None
    """The keys among which ``pairs`` looks for the first of a query: a list for each text, or one list for all.
    Default: all keys of the text."""

    @model_validator(mode="after")
    def _names_differ(self) -> "TokenStatisticOptions":
        names = [*self.token_classes, *getattr(self, "passages", ())]
        for span in self.spans:
            if span.name in names:
                raise at_fault("spans", f"the name {span.name!r} is taken; give each class its own")
            names.append(span.name)
        return self


def check_spans(options: TokenStatisticOptions, statistics: Sequence[str] | None) -> None:
    """Raise an error of validation for spans without the statistic that tells of them."""
    if options.spans and "classes" not in (statistics or ()):
        raise at_fault("statistics", "spans are told of by the statistic classes; add it, or leave spans out")


Passage = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
"""A part of the text, or of the conversation; a list has one for each text."""


class ModelStatisticOptions(TokenStatisticOptions):
    """Options of the statistics.

    A passage is where the text first has it, with the tokens whose last character is in it. Layers whose keys are no
    tokens of the text have no key of a passage.
    """

    passages: dict[ClassName, Passage] = Field(default_factory=dict, max_length=64)
    """Parts of the text by name: the class has the keys of this part."""
    needle: Passage | None = None
    """The part of the text of which ``retrieval`` counts the tokens that an answer copies."""

    @property
    def names_text(self) -> bool:
        """True if it names parts of the text by their characters."""
        return self.needle is not None or bool(self.passages) or any(span.tokens is None for span in self.spans)

    @property
    def names_parts(self) -> bool:
        """True if it names parts of the text."""
        return self.names_text or bool(self.spans)


class ModelWeightsRequest(TokenLabels, ModelInput):
    """Ask for the attention weights of every layer of a whole model.

    The labels take the place of the tokens in a picture of the reply, and are as many as each layer in the reply has
    keys, and queries. Those of the queries are by default those of the keys, if both are the same tokens.
    """

    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each query; 0 for none."""
    select: WeightsSelect | None = None
    """Return the weights of these heads, queries and keys. ``top_k`` covers the same selection, and names keys by their
    index among all; ``pool`` takes no selected keys; the statistics cover all."""
    return_weights: bool = True
    """False omits the weights; the reply then has only statistics and top keys."""
    pool: int | None = Field(default=None, ge=2, lt=2**31)
    """With n, return ``pooled``: the largest weight of each square of n selected queries and n keys."""
    average_heads: bool = False
    """Return the weights averaged over the (selected) heads, without the head dimension."""
    statistics: Listed[StatisticName] | None = Field(default=None, max_length=64)
    """The statistics to return. Default: entropy, max_weight, mean_distance, first_key and own_position; of implicit
    weights without ``normalize``, and with ``apc``, max_weight alone."""
    statistic_options: ModelStatisticOptions = Field(default_factory=ModelStatisticOptions)
    """Settings of the statistics: an object with ``window`` and ``sinks``, in tokens; ``token_classes``, lists of token
    ids by name; ``passages`` and ``spans``, parts of the text by name; ``needle``, the part that ``retrieval`` counts;
    ``pairs`` and ``candidates``, indices of tokens."""
    normalize: Normalization | None = None
    """``absolute``: compute the statistics of the shares |w| / Σ|w| of each query. All statistics but ``max_weight``,
    ``received`` and ``pairs`` need it for layers with implicit weights; ``layers`` that are ``all`` leave these layers
    out without it. ``apc``: return everything of w + wᵀ with the average product correction, of layers whose queries
    and keys are the same tokens, as for a module."""
    compare: Literal["unedited", "base"] | None = None
    """``unedited``: also return ``differences``: the results with the layer's own edits minus those without them, for
    the same input of the layer. ``base``, of a model with an adapter: also return ``base``, the results of its base for
    the same text, and ``differences``: the adapter's minus those."""
    watch: Listed[Watch] = Field(default_factory=list, max_length=16)
    """Linear probes that score every token."""
    keep: bool = False
    """Store the run as a recording with the weights of the requested layers."""

    @model_validator(mode="after")
    def _narrows_something(self) -> "ModelWeightsRequest":
        check_narrowing(self)
        if self.statistic_options.spans:
            check_spans(self.statistic_options, self.statistics)
        if self.watch:
            check_read_alone(self.watch)
        return self


class PredictedLogit(WireModel):
    """The differentiated number: log p(token at a position), minus that of another token if one is given.

    For a model that predicts classes, a class takes the place of the token. The score of a model with one class, such
    as a reranker, is its logit.
    """

    position: int | None = None
    """The position of the token that makes the prediction, negative ones counted from the end. Default: the last; of a
    model that classifies tokens, or finds an answer in a text, the position at which the class is likeliest."""
    token: Index | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A token id, or a text that is one token; the number or the name of a class. Default: the most likely one."""
    against: Index | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Differentiate log p(token) − log p(against)."""
    logit: bool = False
    """Differentiate the logit in place of the log-probability."""


class GivenAnswer(WireModel):
    """The log-probability of a given ``answer``, of the last message of the assistant, or of a ``target``.

    Of a masked model, that of the answer in place of its mask tokens: Σ log p of each, with all of them masked.
    """

    answer: Literal["sum", "mean"]
    """The sum over its tokens, or the mean."""


class GivenUpstream(WireModel):
    """∂L/∂logits as it is given."""

    upstream: FloatArray
    """``[B, L, V]``, or ``[L, V]`` for one text; a first dimension of 1 is the last position alone."""


ModelGradient = Literal[
    "tokens", "embeddings", "hidden", "q", "k", "v", "scores", "weights", "context", "gate", "output", "mlp", "router"
]


def by_token() -> list[ModelGradient]:
    """The gradients that a request returns by default."""
    return ["tokens"]


class ModelGradientsRequest(ModelInput):
    """Exact gradients of one number in the prediction of a model."""

    of: PredictedLogit | GivenAnswer | GivenUpstream | None = None
    """The number that is differentiated: an object with ``position``, ``token`` and ``against``, with ``answer``, or
    with ``upstream``. Default: the sum of log p of the tokens of a given answer, or log p of the most likely token at
    the last position."""
    wrt: Listed[ModelGradient] = Field(default_factory=by_token, min_length=1, max_length=16)
    """``tokens``: one number for each input token, gradient · embedding. ``embeddings``: the gradient itself. By
    layer: ``hidden``, the state after the layer, before the final norm, ``mlp``, what its MLP adds, ``router``, the
    weights of its experts, with 0 for those that a token does not take, and the taps of its attention."""
    select: Select | None = None
    """The heads and queries of the returned gradients of taps, but for ``hidden``, ``mlp``, ``router`` and ``output``.
    """
    by_head: bool = True
    """Return ``heads``: Σ gradient · context of each head, the first-order effect of removing it."""
    integrated: Annotated[int, Field(ge=2, le=512)] | IntegratedGradients | None = None
    """Integrated gradients for ``tokens`` and ``embeddings``: the number of steps from a baseline of zeros, or an
    object with ``steps``, ``rule`` and ``baseline``. Source: Sundararajan et al. 2017."""
    check: bool = False
    """Compare with central differences in float64 along random directions."""

    @property
    def path(self) -> IntegratedGradients | None:
        """The path of integrated gradients, if they are asked for."""
        return IntegratedGradients(steps=self.integrated) if isinstance(self.integrated, int) else self.integrated

    @model_validator(mode="after")
    def _narrows_something(self) -> "ModelGradientsRequest":
        if self.select is not None and _WHOLE_TAPS.issuperset(self.wrt):
            raise at_fault(
                "select", "it narrows taps of attentions; name some in wrt, such as weights, or leave it out"
            )
        if self.layers != "all" and not self.by_head and _OF_ALL.issuperset(self.wrt):
            raise at_fault(
                "layers", "the reply has no layers; name some of their taps in wrt, or leave it or by_head out"
            )
        return self


class LikelyToken(WireModel):
    """One token of the vocabulary, or one class, in a prediction."""

    token: str
    id: int
    logit: AnyNumber
    probability: AnyNumber
    """If the model has one class, the logistic function of its logit."""
    unedited_logit: IfRequested[AnyNumber] = ABSENT
    unedited_probability: IfRequested[AnyNumber] = ABSENT
    """With ``compare``."""
    base_logit: IfRequested[AnyNumber] = ABSENT
    base_probability: IfRequested[AnyNumber] = ABSENT
    """With ``compare: "base"``, in place of these two."""


class Prediction(WireModel):
    """A model's prediction at one token."""

    text: int
    """The index of the text."""
    position: int
    """The index of the token."""
    top: list[LikelyToken]
    """The most likely tokens, in descending order; with ``compare``, the most likely tokens of both runs."""
    divergence: IfRequested[AnyNumber] = ABSENT
    """With ``compare``: Σ p · ln(p / q) of the prediction p of the unedited model, or of the base, and the reply's own
    one q, in nats."""


class AnswerToken(WireModel):
    """One token of a given answer, or of a text whose tokens are masked in turn."""

    position: int
    token: str
    id: int
    logprob: AnyNumber
    """log p of the token after those before it; of a masked token, beside all others."""
    rank: int
    """The number of tokens that were more likely."""
    unedited_logprob: IfRequested[AnyNumber] = ABSENT
    """With ``compare``."""
    base_logprob: IfRequested[AnyNumber] = ABSENT
    """With ``compare: "base"``, in its place."""


class TextLikelihood(WireModel):
    """The pseudo log-likelihood of one text by a masked model. Source: Salazar et al. 2020."""

    tokens: list[AnswerToken]
    """Each token that is no special one, masked alone."""
    sum: AnyNumber
    """Σ log p of these tokens."""
    mean: AnyNumber
    """``sum`` by the number of tokens; exp(−mean) is the pseudo perplexity."""


Answers = list[AnswerToken] | list[list[AnswerToken]]
"""The tokens of an answer; of several texts a list for each."""


class LayerTaps(Taps):
    """The taps of one layer."""

    layer: LayerRef
    gate: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Dv]``, or ``[B, H, Lq, 1]`` if a head has one number: the factor of the context, before the
    projection. Source: Qiu et al. 2025."""
    index_scores: IfRequested[FloatArray] = ABSENT
    """``[B, Lq, T]``: the scores of the T candidates among which an indexer chooses for each query; −∞ for one that it
    may not choose. A candidate is a key, or the n-th pool of several tokens. Source: DeepSeek-AI 2025, DeepSeek-V3.2.
    """
    chosen: IfRequested[BoolArray] = ABSENT
    """``[B, Lq, Lk]``: true for a key that the query may look at: the masks allow it, and the choice keeps it. The
    weight of another key is 0 since it was not looked at."""
    mlp: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: what the MLP of the layer adds to the states, of experts the sum."""
    router: IfRequested[FloatArray] = ABSENT
    """``[B, L, E]``: the weight of each of the E experts of the layer, 0 for one that is not taken: behind softmax or
    sigmoid, the choice, norms and factors, as it multiplies the output of the expert. ``mlp`` is the sum of weights
    times outputs, and what experts that every token takes add beside it."""
    hidden: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: the state after the layer that has this attention, before the final norm;
    ``[B, L, streams, d_model]`` with hyper-connections."""


class ModelForwardReply(ModelReply):
    """The predictions of a whole model, and taps of its layers."""

    predicts: Literal["next", "own", "class"] | None = None
    """``next``: each token predicts the following token. ``own``: each predicts the token at its own position, as in
    BERT. ``class``: the model classifies the text, the image or each token, and the tokens of the predictions are
    classes; or it finds an answer in a text, and each token has a probability to be its ``start`` and its ``end``;
    or it chooses one of several texts, by their numbers. Null for a model without a prediction head."""
    predictions: list[Prediction] = Field(default_factory=list)
    answer: IfRequested[Answers] = ABSENT
    """The tokens of a given answer with their log-probabilities, of a model that predicts the next token; of a masked
    model, in place of the mask tokens."""
    likelihood: IfRequested[TextLikelihood | list[TextLikelihood]] = ABSENT
    """With ``likelihood``; of several texts one for each."""
    logits: IfRequested[FloatArray] = ABSENT
    """``[B, positions, V]``: for the requested positions."""
    embeddings: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: what the table of tokens returns, before positions, types and norms (``inputs_embeds`` of
    transformers). If images or sounds can enter, the input of the first layer."""
    entered: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: the input of the first layer, with ``hidden``."""
    pooled: IfRequested[FloatArray] = ABSENT
    """``[B, width]``: the vector of each image, after the model's projection if it has one."""
    watched: IfRequested[list[ProbeScores]] = ABSENT
    """The scores by each probe of ``watch``, in their order."""
    layers: list[LayerTaps] = Field(default_factory=list)
    """The layers in the order asked, if taps are returned."""


class LayerWeights(WireModel):
    """The weights of each head of one layer: the fields of a module's reply."""

    layer: LayerRef
    statistics: HeadStatistics
    queries: IntArray
    """``[B]``: the number of real queries in the statistics."""
    implicit: IfRequested[bool] = ABSENT
    """True for a layer of kind ``linear`` or ``state_space``: its weights are the matrix M for which M·V is the mixed
    output. They may be negative and need not sum to 1."""
    top: IfRequested[TopKeys] = ABSENT
    weights: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]`` of the selected heads and queries, or ``[B, Lq, Lk]`` averaged over heads."""
    chosen: IfRequested[BoolArray] = ABSENT
    """``[B, Lq, Lk]`` beside ``weights``, of a layer that chooses keys: true for a key that a query may look at. The
    weight of another key is 0 since it was not looked at."""
    pooled: IfRequested[FloatArray] = ABSENT
    differences: IfRequested[WeightsDifferences] = ABSENT
    base: IfRequested["LayerWeights"] = ABSENT
    """The same by the base, with ``compare: "base"``."""


class ModelWeightsReply(ModelReply, DrawableReply):
    """The weights of each head of each layer."""

    picture_names: ClassVar = frozenset({"labels", "query_labels", "heads"})

    layers: list[LayerWeights]
    watched: IfRequested[list[ProbeScores]] = ABSENT
    """The scores by each probe of ``watch``, in their order."""

    def to_table(self) -> Any:
        """Return the statistics as a ``pyarrow.Table``: a row for each layer, text and head.

        Columns: those of ``WeightsReply.to_table`` and ``layer``, which is text if the model has several stacks; with
        ``compare: "base"``, ``base.entropy``. Needs the extra ``tables``. Raises ImportError.
        """
        rows = TableRows()
        for layer in self.layers:
            differences = None if layer.differences is None else layer.differences.statistics
            base = None if layer.base is None else layer.base.statistics
            of_layer = {"": layer.statistics, "differences.": differences, "base.": base}
            rows.add_heads({"text": 0, "layer": layer.layer}, of_layer, BY_KEY)
        return rows.table()

    def names_in(self, options: PictureOptions) -> frozenset[str]:
        """Return the arguments of ``plot`` that a picture uses: of several layers the heads, if it shows weights."""
        names, (first, *more) = super().names_in(options), self.layers
        shows_weights = options.view == "heads" or first.weights is not None or first.pooled is not None
        return names if not more else names & {"heads"} if shows_weights else frozenset()


class LayerGradients(WireModel):
    """Gradients of one layer."""

    layer: LayerRef
    heads: IfRequested[FloatArray] = ABSENT
    """``[B, H]``: Σ ∂L/∂context · context of each head. Source: Michel et al. 2019, without the absolute value."""
    heads_normed: IfRequested[bool] = ABSENT
    """True with ``heads`` of a layer in which each head has a norm right after its context, such as a gated delta net.
    L does not depend on the size of such a context, so ``heads`` are 0 up to rounding and the norm's ε. They do not
    say that the heads do nothing: ask for effects of edits that remove them."""
    gradients: dict[str, FloatArray] = Field(default_factory=dict)
    """∂L/∂name of ``hidden``, ``mlp``, ``router`` and taps. An expert that a token does not take is not computed, and
    its gradient there is 0."""


class ModelGradientsReply(ModelReply):
    """Gradients of one number in the prediction of a model."""

    value: FloatArray
    """``[B]``, or one number: L, what was differentiated."""
    token: IfRequested[list[int]] = ABSENT
    """The token ids whose log-probability is L, one for each text."""
    token_names: IfRequested[list[str]] = ABSENT
    """The same tokens, or classes, as text."""
    answer: IfRequested[Answers] = ABSENT
    """The tokens of the given answer, if L is its log-probability."""
    tokens: IfRequested[FloatArray] = ABSENT
    """``[B, L]``: gradient · embedding of each input token; with ``integrated`` gradient · (embedding − baseline),
    which sum to L minus L at the baseline."""
    embeddings: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``"""
    baseline: IfRequested[FloatArray] = ABSENT
    """``[B]``: L at the baseline, with ``integrated``."""
    completeness: IfRequested[IntegratedCompleteness] = ABSENT
    """The accuracy of the path, with ``integrated``."""
    layers: list[LayerGradients] = Field(default_factory=list)
    check: IfRequested[dict[str, GradientCheck]] = ABSENT
