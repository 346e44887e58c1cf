"""The cost of a whole model for a text, for images or for a generation."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, assembled, at_fault
from attention_contract.schemas.analyses.context import ContextFields, ContextRequest
from attention_contract.schemas.analyses.lenses import LensPart
from attention_contract.schemas.analyses.model_effects import ModelSweptEdit, check_sweep_or_paths
from attention_contract.schemas.analyses.model_paths import PathReceivers, PathSenders
from attention_contract.schemas.analyses.probes import MAX_SAMPLES, ProbeFeature
from attention_contract.schemas.analyses.vectors import VectorMethod
from attention_contract.schemas.prompts import LayersInOrder


class ImageSize(WireModel):
    """The size of an image, in pixels."""

    width: int = Field(ge=1, lt=2**31)
    height: int = Field(ge=1, lt=2**31)


class PricedVector(WireModel):
    """The fields of a fit of a steering vector that change its price; ``batch`` is the number of texts of both sides.

    The length of a text counts its answer, if it has one.
    """

    method: VectorMethod = "mean_difference"
    """The method, as in ``POST /v1/models/{model}/vectors``. ``pca`` takes pairs: an even number of texts."""
    layers: LayersInOrder = "all"
    """The layers behind which states are read."""


class PricedProbe(WireModel):
    """The fields of a fit of a probe that change its price; ``batch`` is the number of labelled texts."""

    of: ProbeFeature
    """The feature, as in ``POST /v1/models/{model}/probes``."""
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """The labelled positions of each text: 1 for ``last`` and ``mean``, or as many as the list has."""


class ModelComplexityRequest(ContextFields):
    """Ask for the cost of a text, of images or of a generation; or of a request for the sources of an answer.

    The fields of ``/v1/models/{model}/context`` give the cost of that request, in place of sizes. Those that choose
    tokens, and ``heads``, change no cost.
    """

    length: int = Field(default=1024, ge=1, lt=2**31)
    """The number of tokens of each text, without those of images; an image encoder has none."""
    target_length: int | None = Field(default=None, ge=1, lt=2**31)
    """The number of tokens of each target, for a model with an encoder and a decoder. Default: ``length``, or with
    ``new_tokens`` the start token alone."""
    images: Annotated[list[ImageSize], Field(max_length=64)] = Field(default_factory=list)
    """The sizes of the images of each text, or of the images that an encoder reads as one batch."""
    batch: int = Field(default=1, ge=1, lt=2**31)
    """The number of texts, each with these images; for an image encoder, the number of such batches."""
    new_tokens: int = Field(default=0, ge=0, lt=2**31)
    """The number of tokens to generate."""
    weights: bool = False
    """True if the request returns the weights of every layer."""
    lens: Listed[LensPart] = Field(default_factory=list, max_length=3)
    """The parts of every layer that a lens reads at all tokens, to price that too."""
    fit: bool = False
    """Price the fit of a Jacobian lens over these texts too."""
    vector: PricedVector | None = None
    """Price the fit of a steering vector to these texts too."""
    probe: PricedProbe | None = None
    """Price the fit of a linear probe to these texts too."""
    likelihood: Literal["masked"] | None = None
    """``masked``: price the pseudo log-likelihood of these texts too, each token masked in turn."""
    sweep: ModelSweptEdit | None = None
    """A sweep of edits over every layer, as in ``/v1/models/{model}/effects``, to price that too."""
    from_: PathSenders | None = Field(default=None, alias="from")
    """The beginnings of paths, as there, to price these."""
    to: PathReceivers | None = None
    """The ends of these paths; default: the logits."""

    @model_validator(mode="after")
    def _sizes_or_prompt(self) -> "ModelComplexityRequest":
        changed = {name for name, about in type(self).model_fields.items() if getattr(self, name) != _default(about)}
        sizes, of_prompt = changed & _SIZES, changed & ContextFields.model_fields.keys() - _ANYWHERE
        if self.has_prompt and sizes:
            raise at_fault(min(sizes).rstrip("_"), "the prompt has its own; leave one of the two out")
        if fits := [name for name in ("fit", "vector", "probe") if getattr(self, name)]:
            self._check_fits(fits[0])
        check_sweep_or_paths(self)
        if not self.has_prompt and of_prompt:
            name = ContextFields.model_fields[min(of_prompt)].alias or min(of_prompt)
            raise at_fault(name, "it goes with text, messages or sources; leave it out, or send one of these")
        return self

    def _check_fits(self, name: str) -> None:
        if self.images:
            raise at_fault("images", f"fits are to texts alone; leave images or {name} out")
        if self.vector is not None and self.vector.method == "pca" and self.batch % 2:
            raise at_fault("batch", "pca takes pairs of texts: expected an even number, those of both sides")

    @property
    def context(self) -> ContextRequest | None:
        """The request for sources that is to be priced; None if only sizes came."""
        if not self.has_prompt:
            return None
        own = ContextFields.model_fields
        return assembled(
            ContextRequest, {name: getattr(self, name) for name in own}, self.model_fields_set & own.keys()
        )


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


_SIZES: Final = ModelComplexityRequest.model_fields.keys() - ContextFields.model_fields.keys()
_ANYWHERE: Final = frozenset({"adapter", "alone", "encoding"})
"""Fields of a request for sources that other requests have too."""


class PassCost(WireModel):
    """The cost of one pass of a whole model."""

    flops: int
    bytes: int
    """The least number of bytes that are read and written: the parameters once, and the cache."""
    peak_bytes: int
    """Memory besides the model."""
    predicted_ms: float
    """The predicted median, corrected by the runs of this model."""
    predicted_low_ms: float
    predicted_high_ms: float
    """Nine of ten runs should take between ``predicted_low_ms`` and ``predicted_high_ms``."""


class ImageTokens(WireModel):
    """The tokens of one image."""

    tokens: int
    """The number of tokens of the image in the text, including markers; for an image encoder, all tokens of the
    image."""
    crops: int
    """The number of crops of the image."""
    vision_tokens: int
    """The number of tokens in the vision layers, for all crops."""


class ContextCost(PassCost):
    """The cost of a request for sources, without the generation of its answer."""

    passes: int
    """The times that the model reads the prompt, or most of it, with the answer."""
    sources: int
    tokens: int
    """Tokens of prompt and answer; of an answer that is to be generated, as many as it may have."""


class SweepCost(PassCost):
    """The cost of a sweep of edits, or of paths, with the passes without them.

    The time is that of as many passes one by one.
    """

    edits: int
    """The edits, or the paths whose end comes after their beginning."""
    passes: int


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
    lens: IfRequested[PassCost] = ABSENT
    """The pass over the tokens, and the five largest logits of each of these states."""
    fit: IfRequested[PassCost] = ABSENT
    """All passes of the fit of a Jacobian lens. The peak memory of a fit is that of a pass, and what the server holds
    meanwhile; admission takes both."""
    vector: IfRequested[PassCost] = ABSENT
    """All passes of the fit of a steering vector, one for each text."""
    probe: IfRequested[PassCost] = ABSENT
    """All passes of the fit of a probe, one for each text, without the regression."""
    likelihood: IfRequested[PassCost] = ABSENT
    """All passes of a likelihood of texts without special tokens, which are not masked."""
    per_token: PassCost
    """The cost of one further token after all others; zeros for an image encoder."""
    sweep: IfRequested[SweepCost] = ABSENT
    """The sweep of edits over texts of this length, for ``sweep``."""
    context: IfRequested[ContextCost] = ABSENT
    """For the fields of a request for sources."""
    total_ms: float
    """The predicted median of the pass over the given tokens and of ``new_tokens`` further ones; of the request for
    sources, if one is priced."""
    total_low_ms: float
    total_high_ms: float
    """Nine of ten should take between ``total_low_ms`` and ``total_high_ms``."""
    cache_bytes_per_token: int
    cache_bytes: int
    """Keys and values after the last token, and running states."""
    max_batch: int
    """Sequences of this length that fit into the free memory."""
    max_length: int
    """The largest number of text tokens that fits besides the images, for this batch; at most the number of positions
    of the model. For an image encoder, the tokens of one image."""
