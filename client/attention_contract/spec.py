"""What an attention computes: the spec, as discriminated unions.

Each part is chosen by its ``name`` and carries only the options of that name. Every field has a default, so ``{}`` is a
spec: scaled dot product, no softcap, no position, no masks, softmax, exact. To add an entry, declare its options here,
add it to its union, and register its computation, gradient and cost in ``attention_service.core``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat

from attention_contract.base import WireModel

# ── scores: s(q, k) ──────────────────────────────────────────────────────────────────────────────────────────────────


class Dot(WireModel):
    """Plain dot product, q·k (Luong et al. 2015, eq. 8, "dot")."""

    name: Literal["dot"] = "dot"


class ScaledDot(WireModel):
    """Scaled dot product, q·k · scale (Vaswani et al. 2017, eq. 1)."""

    name: Literal["scaled_dot"] = "scaled_dot"
    scale: float | None = Field(None, allow_inf_nan=False)
    """Factor on q·k; null is 1/√D for head width D."""


Score = Annotated[Dot | ScaledDot, Field(discriminator="name")]

# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class NoPosition(WireModel):
    """No position encoding: attention is blind to order but for its masks."""

    name: Literal["none"] = "none"


Position = NoPosition

# ── masks: may query i look at key j? ────────────────────────────────────────────────────────────────────────────────


class Causal(WireModel):
    """No look ahead. The request's offset is added to i.

    ``top_left``: j ≤ i. ``bottom_right``: j ≤ i + (new keys − queries), so that the last query stands at the last key.
    """

    name: Literal["causal"] = "causal"
    align: Literal["top_left", "bottom_right"] = "top_left"


class SlidingWindow(WireModel):
    """i − left ≤ j ≤ i + right (Beltagy et al. 2020, section 3.1)."""

    name: Literal["sliding_window"] = "sliding_window"
    left: int | None = Field(None, ge=0, lt=2**31)
    """Keys before the query's own; null is unlimited."""
    right: int | None = Field(None, ge=0, lt=2**31)
    """Keys after the query's own; null is unlimited."""


class GlobalTokens(WireModel):
    """The listed positions see every key and are seen by every query (Beltagy et al. 2020, section 3.1)."""

    name: Literal["global_tokens"] = "global_tokens"
    positions: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=4096)
    """Positions in the sequence, from 0, counted with the request's offset."""


class AnyOf(WireModel):
    """The union: a query may look where at least one of the masks lets it. Longformer is a window or global tokens."""

    name: Literal["any"] = "any"
    of: list["Mask"] = Field(min_length=1, max_length=16)


Mask = Annotated[Causal | SlidingWindow | GlobalTokens | AnyOf, Field(discriminator="name")]
AnyOf.model_rebuild()

# ── normalizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


Temperature = Annotated[PositiveFloat, Field(allow_inf_nan=False)]
_NAMED = ConfigDict(json_schema_extra={"required": ["name"]})
"""Of all but the softmax, so that options without a name fit one JSON Schema of the union."""


class Softmax(WireModel):
    """softmax(s / temperature) over the keys."""

    name: Literal["softmax"] = "softmax"
    temperature: Temperature = 1.0
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """The softmax runs in this dtype, or in that of the scores where it is wider; a narrower one is taken as asked."""


class Sigmoid(WireModel):
    """sigmoid(s / temperature + bias), each key for itself: the weights of a query need not sum to 1."""

    model_config = _NAMED

    name: Literal["sigmoid"] = "sigmoid"
    bias: float | None = Field(None, allow_inf_nan=False)
    """Added to every score; null is −ln n for a sequence of n keys: the past is counted, padding (by ``key_mask`` and
    ``key_lengths``) is not, and what the other masks hide is. Every query of a sequence has the same."""
    temperature: Temperature = 1.0
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """As of the softmax."""


class Sparsemax(WireModel):
    """The distribution nearest to s / temperature: the weights sum to 1, and those of low scores are exactly 0."""

    model_config = _NAMED

    name: Literal["sparsemax"] = "sparsemax"
    temperature: Temperature = 1.0
    dtype: Literal["float32", "float64"] = "float32"
    """It runs in this dtype, or in that of the scores where it is wider."""


class Entmax15(WireModel):
    """1.5-entmax of s / temperature, between softmax and sparsemax: sums to 1, low scores get exactly 0."""

    model_config = _NAMED

    name: Literal["entmax15"] = "entmax15"
    temperature: Temperature = 1.0
    dtype: Literal["float32", "float64"] = "float32"
    """It runs in this dtype, or in that of the scores where it is wider."""


def _softmax_unless_named(options: Any) -> Any:
    """A normalizer without a name is a softmax."""
    return {"name": "softmax", **options} if isinstance(options, Mapping) and "name" not in options else options


Normalizer = Annotated[
    Softmax | Sigmoid | Sparsemax | Entmax15, Field(discriminator="name"), BeforeValidator(_softmax_unless_named)
]

# ── methods ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Exact(WireModel):
    """Every query against every key that the masks allow."""

    name: Literal["exact"] = "exact"


Method = Exact

# ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────────


class AttentionSpec(WireModel):
    """What is computed: score · scale → softcap → bias and masks → normalizer, then the weighted sum of the values."""

    score: Score = Field(default_factory=ScaledDot)
    softcap: float | None = Field(None, gt=0, allow_inf_nan=False)
    """c·tanh(s/c) on the scores, before the masks (Gemma 2, section 2); null for none."""
    position: Position = Field(default_factory=NoPosition)
    masks: list[Mask] = Field(default_factory=list, max_length=16)
    """All of them must allow; an empty list allows everything."""
    normalizer: Normalizer = Field(default_factory=Softmax)
    method: Method = Field(default_factory=Exact)
