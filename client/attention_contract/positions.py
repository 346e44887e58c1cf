"""Position encodings and the norm of queries and keys: their options in a spec.

The place of query i is i + offset (the offset being the length of the past unless the request says otherwise), that of
key j its index among all keys, the past included. A request's ``positions`` give the places of its tokens instead.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from attention_contract.base import Listed, WireModel, at_fault

Theta = Annotated[float, Field(gt=1, le=1e15, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]
Length = Annotated[int, Field(ge=1, le=2**31)]
Divisor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Rotations = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class NoPosition(WireModel):
    """No position encoding: only the masks depend on the order of the tokens."""

    name: Literal["none"] = "none"


# ── added to what comes in ───────────────────────────────────────────────────────────────────────────────────────────


class Sinusoidal(WireModel):
    """Sines and cosines of the place, added (Vaswani et al. 2017, section 3.5).

    In a module to the inputs of the query, key and value projections; for raw q and k to both, in each head.
    """

    name: Literal["sinusoidal"] = "sinusoidal"
    theta: Theta = 10_000.0
    """The longest wavelength is 2π times this."""


class LearnedPosition(WireModel):
    """A learned vector for each place, added as in ``sinusoidal`` (Gehring et al. 2017, section 3.1).

    Learned: ``position.weight [length, d_model]``; ``[length, D]`` for raw q and k.
    """

    name: Literal["learned"] = "learned"
    length: int = Field(ge=1, le=1_048_576)
    """The number of positions with a vector, beginning at 0. Other positions are refused."""


# ── rotated: the score depends on the distance alone ─────────────────────────────────────────────────────────────────


class LinearScaling(WireModel):
    """Every frequency divided by the factor: position interpolation (Chen et al. 2023)."""

    name: Literal["linear"] = "linear"
    factor: Factor


class NtkScaling(WireModel):
    """A larger theta, so that low frequencies stretch and high ones hardly do (Peng et al. 2023, section 3.1).

    θ' = θ·s^(dim/(dim − 2)). With an original length L, s = factor·n/L − (factor − 1) for a sequence that reaches
    n > L places, and 1 for a shorter one: Transformers' ``dynamic``. Without one, s = factor.
    """

    name: Literal["ntk"] = "ntk"
    factor: Factor
    original_max_position_embeddings: Length | None = None


class Llama3Scaling(WireModel):
    """Frequencies that turn less than low_freq_factor times in the original length divided by the factor (Llama 3.1).

    Those that turn more than high_freq_factor times stay as they are, and between the two it is interpolated.
    """

    name: Literal["llama3"] = "llama3"
    factor: Factor
    low_freq_factor: Rotations = 1.0
    high_freq_factor: Rotations = 4.0
    original_max_position_embeddings: Length

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise at_fault(
                "high_freq_factor",
                f"{self.high_freq_factor:g}; make it larger than low_freq_factor, {self.low_freq_factor:g}",
            )
        return self


class YarnScaling(WireModel):
    """Frequencies that turn less than beta_slow times in the original length divided by the factor.

    Those that turn more than beta_fast times stay as they are, and between the two it is interpolated by dimension
    (Peng et al. 2023, section 3.2).
    """

    name: Literal["yarn"] = "yarn"
    factor: Factor
    original_max_position_embeddings: Length
    beta_fast: Rotations = 32.0
    beta_slow: Rotations = 1.0
    attention_factor: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Multiplies the rotated queries and keys; null is 0.1·ln(factor) + 1 (section 3.4)."""
    truncate: bool = True
    """Round the two bounds of the interpolated dimensions outwards to whole numbers."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise at_fault("beta_fast", f"{self.beta_fast:g}; make it larger than beta_slow, {self.beta_slow:g}")
        return self


class LongRopeScaling(WireModel):
    """Each frequency divided by a factor of its own, another one in long sequences (Ding et al. 2024, section 3)."""

    name: Literal["longrope"] = "longrope"
    short_factor: Listed[Divisor] = Field(min_length=1, max_length=8192)
    """One factor for each pair of dimensions, for sequences up to the original length."""
    long_factor: Listed[Divisor] = Field(min_length=1, max_length=8192)
    """The same for longer sequences."""
    factor: Factor
    """The ratio of the model's length to the original one."""
    original_max_position_embeddings: int = Field(ge=2, le=2**31)
    attention_factor: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Multiplies the rotated queries and keys; null is √(1 + ln factor / ln L) for an original length L."""

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor has {len(self.short_factor)} numbers and long_factor {len(self.long_factor)}; "
                "give both one for each pair of dimensions"
            )
        return self


RopeScaling = Annotated[
    LinearScaling | NtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling, Field(discriminator="name")
]


class Rope(WireModel):
    """Queries and keys rotated by angles in proportion to their places (Su et al. 2021, section 3.4).

    Pair c of the turned dimensions turns by place · θ^(−2c/dim).
    """

    name: Literal["rope"] = "rope"
    theta: Theta = 10_000.0
    dim: int | None = Field(default=None, ge=2, le=1_048_576, multiple_of=2)
    """The number of dimensions of a head that are rotated, from the first on; null is all. Even, and at most D."""
    style: Literal["half", "interleaved"] = "half"
    """The pairs of dimensions: c and c + dim/2 (Llama), or 2c and 2c + 1 (GPT-J, the paper)."""
    scaling: RopeScaling | None = None
    """Scaling for sequences longer than in training; null for none."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.dim == 2 and isinstance(self.scaling, NtkScaling):
            raise ValueError("dim is 2, and ntk needs 4 or more: its exponent is dim / (dim − 2)")
        return self


# ── a bias on the scores, with the masks ─────────────────────────────────────────────────────────────────────────────


class Alibi(WireModel):
    """−slope · distance added to the scores, with a slope for each head (Press et al. 2022, section 3).

    Of 2ᵐ heads, head h has the slope 2^(−8(h + 1)/2ᵐ); other numbers of heads take every other one of twice as many.
    """

    name: Literal["alibi"] = "alibi"
    symmetric: bool = True
    """True: the distance is |query position − key position|. False: it is signed, so later keys gain score, as in BLOOM
    and MPT up to a constant in each row. Under a causal mask both are equal."""


class RelativeBias(WireModel):
    """A learned number for each bucket of distances and head, added to the scores (Raffel et al. 2020, section 2.1).

    Half of the buckets are for single distances, the other half grow logarithmically up to ``max_distance``, from
    where on all share the last. Learned: ``relative_bias.weight [num_buckets, H]``.
    """

    name: Literal["relative_bias"] = "relative_bias"
    num_buckets: int = Field(default=32, ge=2, le=1024)
    max_distance: int = Field(default=128, ge=2, lt=2**31)
    bidirectional: bool = True
    """True: half of the buckets are for keys after the query. False: these keys share the bucket of distance 0."""

    @model_validator(mode="after")
    def _bucketed(self) -> Self:
        if self.bidirectional and (self.num_buckets % 2 or self.num_buckets < 4):
            raise ValueError(
                f"num_buckets is {self.num_buckets}; half of them are for each direction: make it even, 4 or more"
            )
        single = self.num_buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= single:
            raise ValueError(
                f"max_distance is {self.max_distance}, and {single} buckets are for single distances; make it larger"
            )
        return self


Position = Annotated[
    NoPosition | Sinusoidal | LearnedPosition | Rope | Alibi | RelativeBias, Field(discriminator="name")
]

# ── the norm of queries and keys ─────────────────────────────────────────────────────────────────────────────────────


class QKNorm(WireModel):
    """q and k divided by their root mean square, times a learned weight, before their rotation (Henry et al. 2020).

    Learned: ``q_norm.weight`` and ``k_norm.weight``, ``[D]``; over all heads ``[H·D]`` and ``[Hkv·D]``.
    """

    eps: float = Field(1e-6, gt=0, le=1, allow_inf_nan=False)
    """Added to the mean square."""
    over: Literal["head", "all_heads"] = "head"
    """The mean is over each head by itself (Qwen 3, Gemma 3), or over all heads of a token (OLMo 2)."""
    unit_offset: bool = False
    """The factor is 1 + weight (Gemma)."""
