"""Whole models: a text, messages, tokens or images in; predictions, weights, gradients and costs out.

Notation as in ``attention``; V is the size of the vocabulary. A request with one text has no batch dimension, and its
reply has none. A request with several texts is one batch, and its reply has the dimension B. Shorter texts are padded,
at the left of a model that generates and at the right of others. All indices count padding too, which has labels of its
own. A layer is named by its number, or in a model of several stacks by its stack and number: ``3``, ``"encoder.3"``,
``"decoder.3"``, ``"cross.3"``, ``"vision.3"``.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.schemas.attention import MAX_INDICES, MAX_TAPS, Edit, Index, Select, Tap, Taps
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.gradients import GradientCheck
from attention_contract.schemas.recordings import RecordingId
from attention_contract.schemas.weights import ClassName, HeadStatistics, StatisticName, TopKeys, WeightsDifferences
from attention_contract.tensors import Encoding, FloatArray, FloatName, IntArray

MAX_TEXT: Final = 1_000_000
"""Characters of one text."""
MAX_TEXTS: Final = 256
"""Texts of one request."""
MAX_TOKENS: Final = 1_048_576
"""Tokens of one text."""
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")]
TokenIds = Annotated[list[Index], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
StackLayer = Annotated[str, Field(pattern=r"^[a-z_]{1,32}\.\d{1,4}$")]
LayerRef = Index | StackLayer
"""``3``, or ``"decoder.3"`` in a model of several stacks."""
LayerKey = Annotated[str, Field(pattern=r"^([a-z_]{1,32}\.)?\d{1,4}$")]
"""The same as the key of an object: ``"3"`` or ``"decoder.3"``."""


class LoadModel(WireModel):
    """Make a checkpoint of the model repository a resident model."""

    checkpoint: str = Field(min_length=1, max_length=1024)
    """Its path inside the model repository: a folder with config.json and safetensors files; or ``tiny``, the model
    that ships with the server."""
    name: ModelName | None = None
    """Default: the path with ``--`` in place of ``/``, as in ``openai-community--gpt2``."""
    dtype: FloatName | None = None
    """The dtype of the computation; default: the checkpoint's on a GPU, float32 on a CPU."""
    device_map: Literal["auto", "balanced"] | None = None
    """``auto``: keep the layers that do not fit into memory on disk, as transformers does with accelerate; on a GPU
    server, use the host's memory before the disk. ``balanced`` needs several devices for a model, and is refused."""


def default_model_name(checkpoint: str) -> str:
    """The name of a model of the checkpoint at a path: the path with ``--`` for ``/``."""
    return checkpoint.strip("/").replace("/", "--")


class ModelLayer(WireModel):
    """One attention of a model."""

    layer: LayerRef
    heads: int
    kv_heads: int
    head_dim: int | None = None


class ModelInfo(WireModel):
    """One model, with the fields of OpenAI's object of that name and more."""

    id: str
    """The name of the model."""
    object: Literal["model"] = "model"
    created: int
    """The time at which its checkpoint was written, in seconds since 1970."""
    owned_by: str = "attention-service"
    checkpoint: str
    """Its path inside the model repository."""
    state: Literal["idle", "loading", "resident"]
    """``idle``: the first request that names it loads it."""
    progress: float | None = None
    """The share of a loading model that is loaded, 0 to 1."""
    architecture: str | None = None
    """The class of transformers that computes it, as in ``GPT2LMHeadModel``."""
    model_type: str | None = None
    takes: list[Literal["text", "messages", "images", "target"]] = Field(default_factory=list)
    """The kinds of input that its requests may have, besides ``tokens``."""
    generates: bool = False
    """True if it predicts the next token, so that it can generate."""
    dtype: str | None = None
    device: str | None = None
    bytes: int = 0
    """Bytes of memory that are reserved for it: the estimate while it is idle or loading."""
    max_length: int | None = None
    """The largest number of tokens, if the model has a limit."""
    layers: list[ModelLayer] = Field(default_factory=list)
    """Its attentions in the order in which they run, vision layers after those of text; known once the model is
    resident."""
    unseen: list[str] = Field(default_factory=list)
    """Kinds of layers whose attention transformers computes, so that it cannot be inspected, such as linear
    attention."""
    problem: str | None = None
    """The reason why it cannot be loaded."""


class ModelList(WireModel):
    """Every model that is resident or can be loaded, in OpenAI's shape."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class ImageBytes(WireModel):
    """One image, as the bytes of a PNG, JPEG, WebP or GIF file. The images of a request have 2^25 pixels at most."""

    base64: str = Field(min_length=1, max_length=2**26)


class TextPart(WireModel):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT)


class ImagePart(WireModel):
    """The place of an image in a message: the next of the request's ``images``."""

    type: Literal["image"]


class DataUrl(WireModel):
    """An image inside its address."""

    url: str = Field(max_length=2**26)
    """``data:image/png;base64,…``; jpeg, webp and gif too. Nothing is fetched."""
    detail: Any = None
    """Accepted, but without effect."""

    @model_validator(mode="after")
    def _is_data(self) -> "DataUrl":
        if not re.match(r"data:image/(png|jpe?g|webp|gif);base64,", self.url):
            raise at_fault("url", "expected data:image/png;base64,… (or jpeg, webp, gif): the server fetches nothing")
        return self


class ImageUrlPart(WireModel):
    """A part of a message that is an image, in the form of OpenAI's API."""

    type: Literal["image_url"]
    image_url: DataUrl


MessagePart = Annotated[TextPart | ImagePart | ImageUrlPart, Field(discriminator="type")]


def kind_of_content(content: Any) -> str:
    """Return ``parts`` for the parts of a message, else ``text``: a refusal names what is wrong with what came."""
    return "parts" if isinstance(content, list) else "text"


class Message(WireModel):
    """One message of a conversation, for models with a chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        Annotated[str, Field(max_length=MAX_TEXT), Tag("text")]
        | Annotated[list[MessagePart], Field(max_length=1024), Tag("parts")],
        Discriminator(kind_of_content),
    ]
    """A text, or parts. Images without a part of their own are inserted before the text of the first message."""


def images_in(messages: Iterable[Any]) -> list[ImageBytes]:
    """Return the images inside the addresses of a conversation, in their order."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    urls = [part.image_url.url for part in parts if isinstance(part, ImageUrlPart)]
    return [ImageBytes(base64=url.partition(",")[2]) for url in urls]


class ModelInput(WireModel):
    """The input of a whole model: exactly one of ``text``, ``tokens`` and ``messages``; images alone for encoders.

    A reply about one image alone has no batch dimension; several images are one batch.
    """

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """One text, or several as one batch."""
    tokens: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """Token ids; no special tokens are added."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)] | None = None
    """A conversation. The checkpoint's chat template formats it, up to the beginning of the model's answer."""
    target: Text | None = None
    """The text of the decoder, for a model with an encoder and a decoder; default: only its start token."""
    images: Annotated[list[ImageBytes], Field(max_length=64)] = Field(default_factory=list)
    """Images, for models that take them, with one text. The model's image token marks the place of each image in the
    text; without such tokens, the images come before the text."""
    layers: Literal["all"] | Annotated[list[LayerRef], Field(min_length=1, max_length=4096)] = "all"
    """The layers in the reply, in this order."""
    edits: dict[LayerKey, Listed[Edit]] = Field(default_factory=dict, max_length=4096)
    """Edits by layer, each in the form of edits of a module: ``{"3": [{"tap": "context", "heads": [0], "set":
    0}]}``."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _one_input(self) -> "ModelInput":
        given = [name for name in ("text", "tokens", "messages") if getattr(self, name) is not None]
        if len(given) > 1:
            raise at_fault(given[1], f"expected one of text, tokens and messages; got {' and '.join(given)}")
        if not given and not self.images:
            raise at_fault("text", "expected text, tokens, messages or images; got none")
        if self.images and images_in(self.messages or ()):
            raise at_fault("images", "the messages bring their own; send them in one way")
        return self

    @property
    def all_images(self) -> list[ImageBytes]:
        """Its images, those inside its messages too."""
        return self.images or images_in(self.messages or ())


ModelTap = Tap | Literal["hidden", "logits", "pooled"]


class ModelForwardRequest(ModelInput):
    """Run a whole model, and return its predictions and any taps of any layers."""

    return_: Listed[ModelTap] = Field(default_factory=list, alias="return", max_length=MAX_TAPS)
    """Taps of the attention of each layer; ``hidden``, the output of each layer; ``logits``, for all tokens of the
    vocabulary; ``pooled``, one vector for each image."""
    select: Select | None = None
    """The heads and queries of those taps; default: all."""
    positions: Listed[int] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """The positions of the tokens whose predictions are returned, negative ones counted from the end; default: the
    last."""
    top_k: int = Field(default=5, ge=0, le=1024)
    """The number of most likely tokens to return for each prediction; 0 for none."""
    average_heads: bool = False
    """Return ``weights`` averaged over the (selected) heads, without the head dimension."""
    compare: Literal["unedited"] | None = None
    """``unedited``: also run the model without the edits. Predictions show both runs, and ``divergence`` compares
    them."""
    keep: bool = False
    """Store the run as a recording: weights, the returned taps and hidden states."""


class ModelStatisticOptions(WireModel):
    """Options of the statistics. Token ids are those of the text."""

    window: int = Field(default=8, ge=0, lt=2**31)
    """Tokens to each side that ``locality`` counts."""
    sinks: int = Field(default=1, ge=0, lt=2**31)
    """First keys that ``sink_share`` counts."""
    token_classes: dict[ClassName, Listed[int]] = Field(default_factory=dict, max_length=64)
    """Token ids by name: the class has the keys with one of these tokens."""


class ModelWeightsRequest(ModelInput):
    """Ask for the attention weights of every layer of a whole model."""

    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each query; 0 for none."""
    select: Select | None = None
    """Return the weights of these heads and queries. ``top_k`` covers the same selection; the statistics cover all."""
    return_weights: bool = True
    """False omits the weights; the reply then has only statistics and top keys."""
    pool: int | None = Field(default=None, ge=2, lt=2**31)
    """With n, return ``pooled``: the largest weight of each square of n selected queries and n keys."""
    average_heads: bool = False
    """Return the weights averaged over the (selected) heads, without the head dimension."""
    statistics: Listed[StatisticName] | None = Field(default=None, max_length=64)
    """The statistics to return. Default: entropy, max_weight, mean_distance, first_key and own_position."""
    statistic_options: ModelStatisticOptions = Field(default_factory=ModelStatisticOptions)
    compare: Literal["unedited"] | None = None
    """``unedited``: also return ``differences``: the results with the layer's own edits minus those without them, for
    the same input of the layer."""
    keep: bool = False
    """Store the run as a recording with the weights of the requested layers."""


class PredictedLogit(WireModel):
    """The differentiated number: log p(token at a position), minus that of another token if one is given."""

    position: int = -1
    """The position of the token that makes the prediction, negative ones counted from the end."""
    token: Index | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """A token id, or a text that is one token. Default: the most likely token."""
    against: Index | Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Differentiate log p(token) − log p(against)."""


class GivenUpstream(WireModel):
    """∂L/∂logits as it is given."""

    upstream: FloatArray
    """``[B, L, V]``, or ``[L, V]`` for one text; a first dimension of 1 is the last position alone."""


ModelGradient = Literal["tokens", "embeddings", "hidden", "q", "k", "v", "scores", "weights", "context", "output"]


def by_token() -> list[ModelGradient]:
    """The gradients that a request returns by default."""
    return ["tokens"]


class ModelGradientsRequest(ModelInput):
    """Exact gradients of one number in the prediction of a model."""

    of: PredictedLogit | GivenUpstream = Field(default_factory=PredictedLogit)
    wrt: Listed[ModelGradient] = Field(default_factory=by_token, min_length=1, max_length=16)
    """``tokens``: one number for each input token, gradient · embedding. ``embeddings``: the gradient itself. By
    layer: ``hidden``, the input of each layer, and the taps of its attention."""
    select: Select | None = None
    """The heads and queries of the returned gradients of taps."""
    by_head: bool = True
    """Return ``heads``: Σ gradient · context of each head, the first-order effect of removing it."""
    integrated: int | None = Field(default=None, ge=2, le=512)
    """The number of steps of integrated gradients for ``tokens`` and ``embeddings``, from a baseline of zeros. Source:
    Sundararajan et al. 2017."""
    check: bool = False
    """Compare with central differences in float64 along random directions."""


class ImageSize(WireModel):
    """The size of an image, in pixels."""

    width: int = Field(ge=1, lt=2**31)
    height: int = Field(ge=1, lt=2**31)


class ModelComplexityRequest(WireModel):
    """Ask for the cost of a text, of images or of a generation."""

    length: int = Field(default=1024, ge=1, lt=2**31)
    """The number of tokens of each text, without those of images; an image encoder has none."""
    images: Annotated[list[ImageSize], Field(max_length=64)] = Field(default_factory=list)
    """The sizes of the images of each text, or of the images that an encoder reads as one batch."""
    batch: int = Field(default=1, ge=1, lt=2**31)
    """The number of texts, each with these images; for an image encoder, the number of such batches."""
    new_tokens: int = Field(default=0, ge=0, lt=2**31)
    """The number of tokens to generate."""
    weights: bool = False
    """True if the request returns the weights of every layer."""


class TokenLabelsReply(WireModel):
    """The tokens of one input, for reading."""

    tokens: list[str]
    """The tokens in readable form: without the tokenizer's own marks, and with bytes as text if they are whole
    characters. Patches of an image are ``[row,column]``; other tokens of an image encoder are ``CLS`` and ``register
    0``."""
    ids: list[int]
    """The token ids; for an image encoder, the positions of the tokens."""
    spans: list[tuple[int, int] | None]
    """Start and end (exclusive) of each token in the characters of the text; null for a token without text."""
    patches: IfRequested[list[tuple[int, int, int] | None]] = ABSENT
    """Image, row and column of each token that is a patch of an image, counted inside its crop."""
    crops: IfRequested[list[int | None]] = ABSENT
    """The crop that each patch belongs to; 0 if the model sees the whole image at once."""
    rectangles: IfRequested[list[tuple[float, float, float, float] | None]] = ABSENT
    """Left, top, right and bottom of each patch in pixels of the original image, after the rotation by its EXIF data.
    Null for padding."""


class ModelRan(WireModel):
    """The run of a request to a whole model."""

    model: str
    architecture: str
    device: str
    dtype: str
    kernels: list[str]
    """The kernels that computed the attention outputs."""
    compute_ms: float
    """Milliseconds in the model's process."""
    queue_ms: float
    """Milliseconds between admission and execution."""
    load_ms: float = 0.0
    """Milliseconds that the request waited for its model to be loaded."""
    peak_bytes: int
    """Memory that the request was admitted for, besides the model: an estimate."""


class ModelReply(WireModel):
    """The fields of every reply for an input."""

    labels: TokenLabelsReply | list[TokenLabelsReply]
    """The tokens of the input, with one entry for each text if there are several; for an encoder-decoder model, those
    of the decoder."""
    image_labels: IfRequested[list[TokenLabelsReply]] = ABSENT
    """The tokens of the layers ``vision.…``, for a model that also reads text. These layers always have a batch
    dimension; there is one entry for each index, which is a crop of an image, or all images as one sequence."""
    encoder_labels: IfRequested[TokenLabelsReply | list[TokenLabelsReply]] = ABSENT
    """The tokens of the encoder's text."""
    recording: IfRequested[RecordingId] = ABSENT
    """The id of the recording, with ``keep``."""
    ran: ModelRan

    def labels_of(self, text: int = 0) -> TokenLabelsReply:
        """Return the tokens of one text by its index, whether one or several came. Raises IndexError."""
        several = self.labels if isinstance(self.labels, list) else [self.labels]
        return several[text]

    def tokens_of(self, layer: LayerRef, text: int = 0) -> tuple[TokenLabelsReply, TokenLabelsReply]:
        """Return the tokens that are the queries and the keys of a layer. Raises IndexError.

        ``text`` is the index of a crop for the layers that see images in a model that reads text too.
        """
        if self.image_labels is not None and str(layer).startswith("vision."):
            return self.image_labels[text], self.image_labels[text]
        own, encoder = self.labels_of(text), self.encoder_labels
        if encoder is None:
            return own, own
        read = encoder[text] if isinstance(encoder, list) else encoder
        stack = str(layer).partition(".")[0]
        return read if stack == "encoder" else own, own if stack == "decoder" else read


class LikelyToken(WireModel):
    """One token of the vocabulary in a prediction."""

    token: str
    id: int
    logit: float
    probability: float
    unedited_logit: IfRequested[float] = ABSENT
    unedited_probability: IfRequested[float] = ABSENT
    """With ``compare``."""


class Prediction(WireModel):
    """A model's prediction at one token."""

    text: int
    """The index of the text."""
    position: int
    """The index of the token."""
    top: list[LikelyToken]
    """The most likely tokens, in descending order; with ``compare``, the most likely tokens of both runs."""
    divergence: IfRequested[float] = ABSENT
    """With ``compare``: Σ p · ln(p / q) of the unedited prediction p and the edited one q, in nats."""


class LayerTaps(Taps):
    """The taps of one layer."""

    layer: LayerRef
    hidden: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: the output of the layer that has this attention."""


class ModelForwardReply(ModelReply):
    """The predictions of a whole model, and taps of its layers."""

    predicts: Literal["next", "own", "class"] | None = None
    """``next``: each token predicts the following token. ``own``: each predicts the token at its own position, as in
    BERT. ``class``: the model classifies the image, and the tokens of the predictions are classes. Null for a model
    without a prediction head."""
    predictions: list[Prediction] = Field(default_factory=list)
    logits: IfRequested[FloatArray] = ABSENT
    """``[B, positions, V]``: for the requested positions."""
    embeddings: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``: the input of the first layer, with ``hidden``."""
    pooled: IfRequested[FloatArray] = ABSENT
    """``[B, width]``: the vector of each image, after the model's projection if it has one."""
    layers: list[LayerTaps] = Field(default_factory=list)
    """The layers in the order asked, if taps are returned."""


class LayerWeights(WireModel):
    """The weights of each head of one layer: the fields of a module's reply."""

    layer: LayerRef
    statistics: HeadStatistics
    queries: IntArray
    """``[B]``: the number of real queries in the statistics."""
    top: IfRequested[TopKeys] = ABSENT
    weights: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]`` of the selected heads and queries, or ``[B, Lq, Lk]`` averaged over heads."""
    pooled: IfRequested[FloatArray] = ABSENT
    differences: IfRequested[WeightsDifferences] = ABSENT


class ModelWeightsReply(ModelReply, DrawableReply):
    """The weights of each head of each layer."""

    layers: list[LayerWeights]


class LayerGradients(WireModel):
    """Gradients of one layer."""

    layer: LayerRef
    heads: IfRequested[FloatArray] = ABSENT
    """``[B, H]``: Σ ∂L/∂context · context of each head. Source: Michel et al. 2019, without the absolute value."""
    gradients: dict[str, FloatArray] = Field(default_factory=dict)
    """∂L/∂name of ``hidden`` and of taps."""


class ModelGradientsReply(ModelReply):
    """Gradients of one number in the prediction of a model."""

    value: FloatArray
    """``[B]``, or one number: L, what was differentiated."""
    token: IfRequested[list[int]] = ABSENT
    """The token ids whose log-probability is L, one for each text."""
    tokens: IfRequested[FloatArray] = ABSENT
    """``[B, L]``: gradient · embedding of each input token; with ``integrated``, they sum to L minus L at the
    baseline."""
    embeddings: IfRequested[FloatArray] = ABSENT
    """``[B, L, d_model]``"""
    baseline: IfRequested[FloatArray] = ABSENT
    """``[B]``: L at the baseline, with ``integrated``."""
    layers: list[LayerGradients] = Field(default_factory=list)
    check: IfRequested[dict[str, GradientCheck]] = ABSENT


class PassCost(WireModel):
    """The cost of one pass of a whole model."""

    flops: int
    bytes: int
    """The least number of bytes that are read and written: the parameters once, and the cache."""
    peak_bytes: int
    """Memory besides the model."""
    predicted_ms: float


class ImageTokens(WireModel):
    """The tokens of one image."""

    tokens: int
    """The number of tokens of the image in the text, including markers; for an image encoder, all tokens of the
    image."""
    crops: int
    """The number of crops of the image."""
    vision_tokens: int
    """The number of tokens in the vision layers, for all crops."""


class ModelComplexityReply(WireModel):
    """The cost of a text with its images, and of a generation after it."""

    model: str
    parameters: int
    """The number of parameters."""
    parameter_bytes: int
    prefill: PassCost
    """The pass over the given tokens and images."""
    vision: IfRequested[PassCost] = ABSENT
    """The part of ``prefill`` in the vision layers; for an image encoder, all of it."""
    images: IfRequested[list[ImageTokens]] = ABSENT
    """Each image, in the order asked."""
    per_token: PassCost
    """The cost of one further token after all others; zeros for an image encoder."""
    total_ms: float
    cache_bytes_per_token: int
    cache_bytes: int
    """Keys and values after the last token."""
    max_batch: int
    """Sequences of this length that fit into the free memory."""
    max_length: int
    """The largest number of text tokens that fits besides the images, for this batch; at most the number of positions
    of the model. For an image encoder, the tokens of one image."""


EXAMPLE_TEXT: Final[dict[str, Any]] = {"text": "the cat sat on the mat"}
