"""The spec of an attention, as discriminated unions.

Each part is chosen by its ``name`` and carries only the options of that name. Every field has a default, so ``{}`` is a
spec: scaled dot product, no softcap, no position, no masks, softmax, exact. To add an entry, declare its options here,
add it to its union, and register its computation, gradient and cost in ``attention_service.core``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from attention_contract.base import Listed, WireModel, at_fault
from attention_contract.positions import NoPosition, Position, QKNorm

MAX_MASKS: Final = 64
"""Masks of one spec, nested ones counted: the pairs that they allow together are counted exactly."""
MAX_POSITIONS: Final = 16_384
"""Positions and lengths that they list together."""

Constant = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
"""A factor that keeps scores of any common size finite in float32, and not zero."""

# ── scores: s(q, k) ──────────────────────────────────────────────────────────────────────────────────────────────────


class Dot(WireModel):
    """Plain dot product, q·k (Luong et al. 2015, eq. 8, "dot")."""

    name: Literal["dot"] = "dot"


class ScaledDot(WireModel):
    """Scaled dot product, q·k · scale (Vaswani et al. 2017, eq. 1)."""

    name: Literal["scaled_dot"] = "scaled_dot"
    scale: float | None = Field(default=None, ge=-1e9, le=1e9, allow_inf_nan=False)
    """Factor on q·k; null is 1/√D for head width D."""


class Bilinear(WireModel):
    """qᵀ W k, one W for each head (Luong et al. 2015, eq. 8, "general").

    Learned: ``score.weight [H, D, Dk]``, where Dk is the width of the keys.
    """

    name: Literal["bilinear"] = "bilinear"


class Additive(WireModel):
    """vᵀ tanh(W₁ q + W₂ k) (Bahdanau et al. 2015, appendix A.1.2).

    Learned: ``score.query_weight [H, hidden, D]``, ``score.key_weight [H, hidden, Dk]`` and ``score.v [H, hidden]``,
    where Dk is the width of the keys.
    """

    name: Literal["additive"] = "additive"
    hidden: int | None = Field(default=None, ge=1, le=65_536)
    """Width of the layer between; null is the head width D."""


class Gaussian(WireModel):
    """−‖q − k‖² / 2σ²: with a softmax, kernel regression (Nadaraya 1964; Watson 1964)."""

    name: Literal["gaussian"] = "gaussian"
    sigma: Constant | Literal["learned"] = 1.0
    """The bandwidth σ, or ``learned``: ``score.sigma [H]``, one for each head, of which the magnitude counts, from 1e-6
    on."""


class Cosine(WireModel):
    """q·k / (‖q‖ ‖k‖) · scale; 0 where either vector is zero (Graves et al. 2014, eq. 6)."""

    name: Literal["cosine"] = "cosine"
    scale: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | Literal["learned"] = 1.0
    """The factor, or ``learned``: ``score.scale [H]``, one for each head."""


Score = Annotated[Dot | ScaledDot | Bilinear | Additive | Gaussian | Cosine, Field(discriminator="name")]

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
    left: int | None = Field(default=None, ge=0, lt=2**31)
    """Keys before the query's own; null is unlimited."""
    right: int | None = Field(default=None, ge=0, lt=2**31)
    """Keys after the query's own; null is unlimited."""


class GlobalTokens(WireModel):
    """The listed positions see every key and are seen by every query (Beltagy et al. 2020, section 3.1)."""

    name: Literal["global_tokens"] = "global_tokens"
    positions: Listed[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=4096)
    """Positions in the sequence, from 0, counted with the request's offset; a request's ``global_mask`` adds others."""
    projections: Literal["shared", "separate"] = "shared"
    """``separate``: the queries at these positions, and the keys and values that they see, have projections of their
    own in a module: ``q_global``, ``k_global`` and ``v_global``, in the shapes of ``q_proj`` and the others."""


class PrefixLM(WireModel):
    """Every query sees the first keys, and beyond them none ahead: j < length or j ≤ i (Raffel et al. 2020, 3.2.1).

    With the request's offset added to i, as in ``causal`` with ``top_left``.
    """

    name: Literal["prefix_lm"] = "prefix_lm"
    length: int = Field(ge=0, lt=2**31)
    """The number of keys that every query sees."""


class Block(WireModel):
    """A query sees the keys of its own block of positions: ⌊j/size⌋ = ⌊i/size⌋ (Child et al. 2019, section 4.3)."""

    name: Literal["block"] = "block"
    size: int = Field(ge=1, lt=2**31)
    """Positions in a block; the first block begins at position 0."""
    neighbours: int = Field(default=0, ge=0, lt=2**31)
    """The number of blocks that a query sees to each side of its own."""


class Strided(WireModel):
    """A neighbourhood, and every key at a multiple of the stride away (Child et al. 2019, section 4.3).

    |i − j| ≤ local or (i − j) mod stride = 0. The paper's pattern is this with ``causal``, which is not implied.
    """

    name: Literal["strided"] = "strided"
    stride: int = Field(ge=1, lt=2**31)
    local: int | None = Field(default=None, ge=0, lt=2**31)
    """Keys before and after the query's own; null is the stride."""


class FixedStride(WireModel):
    """A query sees its own block, and the last keys of every block (Child et al. 2019, section 4.3).

    ⌊j/stride⌋ = ⌊i/stride⌋ or j mod stride ≥ stride − summary. The paper's pattern is this with ``causal``, which is
    not implied.
    """

    name: Literal["fixed"] = "fixed"
    stride: int = Field(ge=1, lt=2**31)
    """Positions in a block; the first block begins at position 0."""
    summary: int = Field(default=1, ge=1, lt=2**31)
    """The number of keys at the end of each block that every query sees; at most the stride."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.summary > self.stride:
            raise at_fault("summary", f"{self.summary}, and a block has {self.stride} positions; make it that or fewer")
        return self


class RandomBlocks(WireModel):
    """Each block of queries sees as many blocks of keys, drawn at random (Zaheer et al. 2020, section 2).

    Drawn without repetition among all blocks of the keys, past and padding included, from the seed, the number of the
    query's block and the number of blocks of keys alone: the same on every device, and for every head and sequence.
    """

    name: Literal["random_blocks"] = "random_blocks"
    size: int = Field(ge=1, lt=2**31)
    """Positions in a block, of queries (their offset added) and of keys; the first block begins at position 0."""
    count: int = Field(ge=1, le=64)
    """The number of blocks of keys that a query sees; all of them if there are fewer."""
    seed: int = Field(default=0, ge=0, lt=2**31)


class Documents(WireModel):
    """Sequences packed into one: a query sees the keys of its own document (Krell et al. 2021).

    Positions beyond the listed documents form one more; a query before position 0 stands in none and sees nothing.
    """

    name: Literal["documents"] = "documents"
    lengths: Listed[Annotated[int, Field(ge=1, lt=2**31)]] = Field(min_length=1, max_length=4096)
    """Positions in each document; the first begins at position 0. The same for every sequence of the batch."""


class AnyOf(WireModel):
    """The union: a query may look where at least one of the masks lets it. Longformer is a window or global tokens."""

    name: Literal["any"] = "any"
    of: Listed["Mask"] = Field(min_length=1, max_length=16)


class AllOf(WireModel):
    """The intersection: a query may look where each of the masks lets it, as in ``masks``; to nest in an ``any``."""

    name: Literal["all"] = "all"
    of: Listed["Mask"] = Field(min_length=1, max_length=16)


Mask = Annotated[
    Causal
    | SlidingWindow
    | GlobalTokens
    | PrefixLM
    | Block
    | Strided
    | FixedStride
    | RandomBlocks
    | Documents
    | AnyOf
    | AllOf,
    Field(discriminator="name"),
]

# ── normalizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


_REQUIRES_NAME = ConfigDict(json_schema_extra={"required": ["name"]})
"""The name field of all but the softmax, so that options without a name fit one schema of the union."""


class Softmax(WireModel):
    """softmax(s / temperature) over the keys."""

    name: Literal["softmax"] = "softmax"
    temperature: Constant = 1.0
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """The softmax runs in this dtype, or in that of the scores where it is wider; a narrower one is taken as asked."""
    sinks: bool = False
    """Beside the keys one more score for each head, learned (``sinks [H]``), takes weight and gives nothing, so that
    the weights of a query sum to less than 1 (Agarwal et al. 2025, gpt-oss, section 2.2; Xiao et al. 2024). It is
    divided by the temperature as the others are, and no mask hides it."""


class Sigmoid(WireModel):
    """sigmoid(s / temperature + bias), each key for itself: the weights of a query need not sum to 1."""

    model_config = _REQUIRES_NAME

    name: Literal["sigmoid"] = "sigmoid"
    bias: float | None = Field(default=None, allow_inf_nan=False)
    """Added to every score; null is −ln n for a sequence of n keys: the past is counted, padding (by ``key_mask`` and
    ``key_lengths``) is not, and what the other masks hide is. Every query of a sequence has the same."""
    temperature: Constant = 1.0
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """The same as for the softmax."""


class Sparsemax(WireModel):
    """The distribution nearest to s / temperature: the weights sum to 1, and those of low scores are exactly 0."""

    model_config = _REQUIRES_NAME

    name: Literal["sparsemax"] = "sparsemax"
    temperature: Constant = 1.0
    dtype: Literal["float32", "float64"] = "float32"
    """It runs in this dtype, or in that of the scores where it is wider."""


class Entmax15(WireModel):
    """1.5-entmax of s / temperature, between softmax and sparsemax: sums to 1, low scores get exactly 0."""

    model_config = _REQUIRES_NAME

    name: Literal["entmax15"] = "entmax15"
    temperature: Constant = 1.0
    dtype: Literal["float32", "float64"] = "float32"
    """It runs in this dtype, or in that of the scores where it is wider."""


def _named(default: str, options: Any) -> Any:
    """Give options without a name the default one."""
    return {"name": default, **options} if isinstance(options, Mapping) and "name" not in options else options


Normalizer = Annotated[
    Softmax | Sigmoid | Sparsemax | Entmax15, Field(discriminator="name"), BeforeValidator(partial(_named, "softmax"))
]

# ── methods ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Exact(WireModel):
    """Every query against every key that the masks allow."""

    name: Literal["exact"] = "exact"


class Linear(WireModel):
    """φ(q)·φ(k) in place of exp(q·k), as a running state: o_i = φ(q_i) S_i / φ(q_i)·z_i (Katharopoulos et al. 2020).

    Without masks every query reads the state after the last key; with ``causal`` alone, the one after its own. The
    score and the normalizer of the spec say nothing here and keep their defaults. With a gate and β (``rule``), which
    the request sends as ``gate`` and ``beta`` to raw attention, and a module learns:

    - ``sum``: S_j = S_{j−1} + φ(k_j) v_jᵀ
    - ``gated``: S_j = g_j S_{j−1} + φ(k_j) v_jᵀ (Yang et al. 2024, gated linear attention)
    - ``delta``: S_j = S_{j−1} + β_j φ(k_j) (v_j − S_{j−1}ᵀ φ(k_j))ᵀ (Schlag et al. 2021)
    - ``gated_delta``: as ``delta``, with g_j S_{j−1} for S_{j−1} (Yang et al. 2025)
    """

    model_config = _REQUIRES_NAME

    name: Literal["linear"] = "linear"
    features: Literal["elu", "relu", "identity", "l2"] | None = None
    """φ: elu(x) + 1, max(x, 0), x, or x / √(Σ x² + 10⁻⁶). Null is ``elu`` for the rules ``sum`` and ``gated``, and
    ``l2`` for the delta rules, under which a state can grow without bound where features are longer than 1."""
    rule: Literal["sum", "gated", "delta", "gated_delta"] = "sum"
    """The rule by which a key and its value are written; all but ``sum`` need the mask ``causal``."""
    normalize: bool | None = None
    """Divide by φ(q)·z, z being the sum of φ(k) (faded as S is). Null is true for ``sum`` and ``gated`` with positive
    features (elu, relu), else false."""
    scale: float | None = Field(default=None, ge=-1e9, le=1e9, allow_inf_nan=False)
    """Factor on the queries' features, where nothing is normalized; null is 1."""

    @property
    def map(self) -> Literal["elu", "relu", "identity", "l2"]:
        """The features, the default filled in."""
        return self.features or ("elu" if self.rule in {"sum", "gated"} else "l2")

    @property
    def normalized(self) -> bool:
        """True if the output is divided by φ(q)·z."""
        return self._divides if self.normalize is None else self.normalize

    @property
    def _divides(self) -> bool:
        return self.rule in {"sum", "gated"} and self.map in {"elu", "relu"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.normalize and not self._divides:
            raise at_fault(
                "normalize",
                f"rule {self.rule} with features {self.map} has no positive sum to divide by; leave normalize out, or "
                "take rule sum or gated with features elu or relu",
            )
        if self.normalized and self.scale is not None:
            raise at_fault("scale", "it cancels where the sum is divided by; leave it out, or set normalize to false")
        return self


class Performer(WireModel):
    """Softmax attention by positive orthogonal random features (FAVOR+, Choromanski et al. 2021).

    An unbiased estimate of each exp(score) whose error falls as 1/√features. Without masks or with ``causal`` alone.
    """

    model_config = _REQUIRES_NAME

    name: Literal["performer"] = "performer"
    features: int | None = Field(default=None, ge=1, le=2**16)
    """The number of random directions; null is ⌊D · ln D⌋ for head width D, and 1 at least."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """The seed of the draw: on the CPU in float64, the same for every head, device and dtype."""


class Linformer(WireModel):
    """Softmax attention over keys and values projected along the sequence to a fixed length (Wang et al. 2020).

    K' = E K, V' = F V with learned ``method.key_projection`` and ``method.value_projection`` ``[rank, length]``. Of
    fewer keys than ``length``, the first columns are used. No masks but padding.
    """

    model_config = ConfigDict(json_schema_extra={"required": ["name", "rank", "length"]})

    name: Literal["linformer"] = "linformer"
    rank: int = Field(ge=1, le=2**16)
    """The number of projected keys."""
    length: int = Field(ge=1, le=2**24)
    """The most keys, the past included."""
    shared: bool = False
    """One projection for keys and values, ``method.key_projection``."""


class Nystrom(WireModel):
    """Softmax attention through landmarks, the means of segments of queries and of keys (Xiong et al. 2021).

    softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V, the pseudo-inverse by iteration. No masks but padding. With as many
    landmarks as queries and keys it is exact.
    """

    model_config = _REQUIRES_NAME

    name: Literal["nystrom"] = "nystrom"
    landmarks: int = Field(default=64, ge=1, le=4096)
    """The number of segments, at most the number of real queries or keys."""
    iterations: int = Field(default=6, ge=0, le=64)
    """Iterations of the pseudo-inverse. Each about cubes the remaining error."""


Method = Annotated[
    Exact | Linear | Performer | Linformer | Nystrom,
    Field(discriminator="name"),
    BeforeValidator(partial(_named, "exact")),
]

# ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────────


class AttentionSpec(WireModel):
    """The computation: score · scale → softcap → bias and masks → normalizer, then the weighted sum of the values."""

    score: Score = Field(default_factory=ScaledDot)
    softcap: Constant | None = None
    """c·tanh(s/c) on the scores, before the masks (Gemma 2, section 2); null for none."""
    position: Position = Field(default_factory=NoPosition)
    qk_norm: QKNorm | None = None
    """Root mean square norm of q and k before their rotation; null for none."""
    masks: Listed[Mask] = Field(default_factory=list, max_length=16)
    """All of them must allow; an empty list allows everything."""
    add_bias_kv: bool = False
    """One more key and value after all others, learned (``bias_k [Hkv·D]``, ``bias_v [Hkv·Dv]``), which no mask hides:
    ``torch.nn.MultiheadAttention``'s."""
    add_zero_attn: bool = False
    """One more key and value of zeros after all others, which no mask hides: ``torch.nn.MultiheadAttention``'s."""
    normalizer: Normalizer = Field(default_factory=Softmax)
    method: Method = Field(default_factory=Exact)

    @model_validator(mode="after")
    def _countable(self) -> "AttentionSpec":
        masks, positions, waiting = 0, 0, list(self.masks)
        while waiting:
            mask = waiting.pop()
            masks += 1
            positions += len(mask.positions) if isinstance(mask, GlobalTokens) else 0
            positions += len(mask.lengths) if isinstance(mask, Documents) else 0
            waiting += mask.of if isinstance(mask, AnyOf | AllOf) else []
        if masks > MAX_MASKS or positions > MAX_POSITIONS:
            raise at_fault(
                "masks",
                f"they are {masks} with {positions} listed positions, nested ones counted; "
                f"expected at most {MAX_MASKS} and {MAX_POSITIONS}",
            )
        return self
