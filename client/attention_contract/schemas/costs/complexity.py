"""The cost of an attention: counts for one shape or a sweep of shapes.

A FLOP is one multiplication, addition, comparison, division or elementary function; a matrix product of ``[m, k]`` by
``[k, n]`` is 2·m·k·n. ``dense`` counts every query-key pair, ``masked`` those that the spec's masks allow.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.schemas.answers import (
    CostLimits,
    Crossover,
    Executed,
    Milliseconds,
    PerToken,
    Predicted,
    TapCost,
)
from attention_contract.schemas.attention import MAX_TAPS, KernelName, Tap, output_only
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.modules import Heads, Width
from attention_contract.schemas.sessions import MAX_SEQUENCES, FullPolicy, Length, Policy
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import FloatName

MAX_ALTERNATIVES = 16


class Shape(WireModel):
    """The sizes of one request."""

    batch: int = Field(default=1, ge=1, lt=2**31)
    """Sequences."""
    queries: int = Field(ge=1, lt=2**31)
    """Queries of each sequence."""
    keys: int | None = Field(default=None, ge=1, lt=2**31)
    """New keys, without the past; default: as many as queries."""
    past: int = Field(default=0, ge=0, lt=2**31)
    """Keys of earlier tokens; they are also the offset of the positional masks."""


Omitted = Literal["costs", "compared", "crossovers"]
"""A part of an answer about costs that the server left out, since its time was over."""


class Alternative(WireModel):
    """An alternative to compare with the request. Fields that are not given equal the request's."""

    label: str | None = Field(default=None, min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f\ufffe\uffff]+$")
    """Its name in the reply; default: a description of the difference."""
    spec: AttentionSpec | None = None
    kernel: KernelName | None = None
    return_: Listed[Tap] | None = Field(default=None, alias="return", min_length=1, max_length=MAX_TAPS)
    dtype: FloatName | None = None
    d_model: Width | None = None
    """Width of the model. Widths that follow it, and the ones below, are those of ``Sweep.dimension``."""
    num_heads: Heads | None = None
    num_kv_heads: Heads | None = None
    head_dim: Width | None = None
    value_dim: Width | None = None
    hardware: str | None = Field(default=None, max_length=80)


class SessionShape(WireModel):
    """A session whose cost is predicted. Its steps append one token to each sequence."""

    sequences: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    policy: Policy = Field(default_factory=FullPolicy)
    pasts: Listed[Length] = Field(default_factory=lambda: [0, 1024, 4096, 16_384], min_length=1, max_length=64)
    """The lengths of the past for which the cost of a step is predicted."""


class SessionStepCost(WireModel):
    """One step of one new token for each sequence."""

    past: int
    """Number of earlier tokens."""
    held: int
    """Number of these whose keys and values the policy keeps."""
    bytes: int
    """Bytes of the session's pages during the step."""
    predicted: Milliseconds
    """Predicted time of the step, with the weights that the policy needs and the whole past that ``report_error`` runs
    over."""


class SessionCost(WireModel):
    """The cost of one session of a module."""

    token_bytes: int
    """Bytes of the keys and values of one token of one sequence, in the module's dtype."""
    page_tokens: int
    """Number of tokens of one page. A sequence takes whole pages."""
    free_bytes: int
    """Bytes that pages may still take, or ``memory_bytes``."""
    longest: int | None = None
    """The most tokens of each sequence that fit in ``free_bytes``, in whole pages. Null for a policy that holds so few
    that there is no limit."""
    steps: list[SessionStepCost]
    """The cost of a step, in the order of ``pasts``."""


class ComplexityRequest(WireModel):
    """Ask for the cost of a module, for one shape or a sweep of shapes."""

    shape: Shape
    sweep: Sweep | None = None
    """The sizes to vary. Default: only the shape itself."""
    return_: Listed[Tap] = Field(default_factory=output_only, alias="return", min_length=1, max_length=MAX_TAPS)
    """Taps to return. They cost memory, and the time to compute them again."""
    kernel: KernelName | None = None
    """The kernel whose cost is reported; default: the planner's choice."""
    memory_bytes: int | None = Field(default=None, ge=0, lt=2**63)
    """Number of free bytes for the plan and the limits; default: the device's free bytes."""
    hardware: str | None = Field(default=None, max_length=80)
    """Name of another device, as ``GET /v1/complexity/hardware`` lists them, whose datasheet gives the times; default:
    the server's own."""
    compare: Listed[Alternative] = Field(default_factory=list, max_length=MAX_ALTERNATIVES)
    """Alternatives over the same shapes. The reply gives their costs and crossovers."""
    session: SessionShape | None = None
    """A session of the module whose cost is predicted, for the request's device and memory. It does not depend on the
    shape."""
    measure: bool = False
    """Also run the alternatives near each predicted crossover of times, and report the measured crossover
    (``crossovers[].measured``). This takes some seconds; other requests run between the measurements."""
    version: str | None = Field(default=None, max_length=256)
    """Refuse the request unless the module is at this version."""


class RawComplexityRequest(ComplexityRequest):
    """The cost of a raw attention: no projections."""

    num_heads: Heads
    """Query heads."""
    num_kv_heads: Heads | None = None
    """Key/value heads; must divide ``num_heads``. Default: ``num_heads``."""
    head_dim: Width
    """Width of a head's queries and keys."""
    value_dim: Width | None = None
    """Width of a head's values; default: ``head_dim``."""
    key_dim: Width | None = None
    """Width of a head's keys, for an additive or bilinear score; default: ``head_dim``."""
    dtype: FloatName = "float32"
    """The type of the inputs."""
    spec: AttentionSpec = Field(default_factory=AttentionSpec)
    """The computation."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "RawComplexityRequest":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise at_fault("num_kv_heads", f"{self.num_kv_heads} does not divide num_heads {self.num_heads}")
        return self


class StageFlops(WireModel):
    """FLOPs by stage."""

    projections: int
    """The matrix products that compute queries, keys and values from their inputs."""
    position: int
    """Position encoding and norm of queries and keys: elementwise work on tokens, and a bias for every pair counted."""
    scores: int
    """q·k for every pair counted."""
    normalizer: int
    """Scale, softcap, softmax: elementwise work on every pair counted."""
    values: int
    """The weighted sum of the values."""
    output_projection: int
    matmul: int
    """The matrix products alone, as PyTorch's FLOP counter counts them."""
    total: int


class PassFlops(WireModel):
    """One direction, counted over all pairs and over the pairs that the masks allow."""

    dense: StageFlops
    masked: StageFlops


class PeakBytes(WireModel):
    """Peak memory of one request on the device, beyond the resident parameters: forward by kernel, and gradients.

    If the method approximates, the kernels' bytes are those of exact attention, for comparison. A kernel that cannot
    compute the spec in this dtype has none.
    """

    fused: int | None = None
    """Without materialized weights; with a dense mask unless it is causal."""
    blocked: int | None = None
    """One tile of scores at a time, without a dense mask."""
    materialized: int | None = None
    """With the whole ``[B, H, Lq, Lk]`` of scores and weights."""
    request: int
    """Bytes of the request itself, with its kernel and taps."""
    gradients: int | None = None
    """Peak of a forward and a backward pass, with ``gradients_kernel``: the gradients of the output with respect to
    inputs and parameters. Null where the kernel named has none."""


class MemoryPhase(WireModel):
    """Bytes held on the device during one step of a pass, beyond the resident parameters."""

    direction: Literal["forward", "backward"]
    """``backward`` is a forward and a backward pass together, with the tensors that autograd keeps."""
    name: str
    tensors: dict[str, int]
    """Bytes by name; docs/cost-model.md explains the names."""
    bytes: int
    """Bytes of all of them."""


class Cost(WireModel):
    """The cost of one shape."""

    shape: Shape
    """The shape, with every default filled in."""
    pairs: int
    """Query-key pairs of one head: B · Lq · Lk."""
    allowed_pairs: int
    """Pairs that the spec's masks allow; exact up to 16,384 × 16,384 pairs, an estimate beyond."""
    forward: PassFlops
    backward: PassFlops
    """Gradients with respect to inputs and parameters, with the materialized kernel: no recomputation."""
    backward_fused: PassFlops
    """The same with a fused kernel, which recomputes the scores."""
    kernel: str
    """The kernel that the planner would choose for the forward pass, or the one that the request names. For a method
    that approximates, the method's name stands here and below."""
    gradients_kernel: str | None = None
    """The kernel for gradients. It determines everything about a backward pass: ``executed_backward_flops``, and the
    gradients in ``executed``, ``peak_bytes``, ``memory`` and ``predicted``. Null if the named kernel has no
    gradients."""
    decode_kernel: str | None = None
    """The kernel for a decode step, which ``executed.decode`` and ``predicted.decode`` assume. Null if there is no such
    step."""
    executed_flops: int
    """FLOPs of a forward pass with that kernel; the blocked kernel skips tiles without an allowed pair."""
    executed_backward_flops: int | None = None
    """FLOPs of a backward pass with ``gradients_kernel``, repeated computation included."""
    executed: Executed
    """The operations of the passes."""
    taps: dict[str, TapCost] = Field(default_factory=dict)
    """The cost that each requested tap adds to the request without it; the output is always returned."""
    taps_together: IfRequested[TapCost] = ABSENT
    """The cost that all requested taps together add to the output alone, which is not the sum of their single costs.
    Null if the output alone is requested.

    Taps share intermediate results (the weights need the scores), and a shared result is in none of the single costs.
    Peak memory is that of the largest step, which another tap may determine. ``output_bytes`` do add up."""
    intensity: float
    """FLOPs of the forward pass for each byte that it reads or writes."""
    parameter_bytes: int
    input_bytes: int
    output_bytes: int
    kv_cache_bytes: int
    """Keys and values of all tokens (past and new) in the module's dtype."""
    kv_cache_bytes_per_token: int
    peak_bytes: PeakBytes
    memory: list[MemoryPhase] = Field(default_factory=list)
    """Memory of the request, step by step: of its forward pass with the requested taps, and of the gradients of the
    output. The largest forward step is ``peak_bytes.request``, up to a page."""
    predicted_ms: float
    """Predicted milliseconds of a forward pass on this device: the median."""
    predicted: Predicted
    per_token: PerToken


class Growth(WireModel):
    """The growth of the cost with the varied size: exponents between the two largest values, and the asymptotic form.

    All are those of the kernel that the planner would choose for the largest size, or that the request names.
    """

    dimension: str
    between: tuple[int, int]
    """The two sizes of the exponents: the two largest values that differ and are not 0, or a single value and its
    double. For a cost c the exponent is log(c₂/c₁) / log(n₂/n₁), so a constant cost has 0. Null if a cost is 0, as with
    masks that forbid everything."""
    flops_exponent: float | None = None
    time_exponent: float | None = None
    """The exponent of the predicted median time of a forward pass."""
    peak_bytes_exponent: float | None = None
    time_order: str
    """The order of time, such as ``O(n²·d)``."""
    memory_order: str
    letters: dict[str, str]
    """The meaning of each letter in the two orders."""


class Compared(WireModel):
    """One of the compared alternatives, in the order of the sweep."""

    label: str
    device_name: str
    """Device of the times and limits."""
    parameter_count: int
    costs: list[Cost]
    growth: Growth
    limits: CostLimits


class ComplexityReply(DrawableReply):
    """Costs, in the order of the sweep."""

    picture_names: ClassVar = frozenset({"sweep"})

    device_name: str
    """Device of the times and limits."""
    parameter_count: int
    costs: list[Cost]
    growth: Growth
    limits: CostLimits
    projections_crossover: int | None = None
    """The length from which on attention over all pairs takes as many FLOPs in matrix products as the projections:
    twice ``d_model`` for plain multi-head attention. Null without projections, or if the method approximates."""
    compared: list[Compared] = Field(default_factory=list)
    """The alternatives of ``compare``; the first is the request itself."""
    crossovers: list[Crossover] = Field(default_factory=list)
    """Crossovers of each two, for time, memory and FLOPs, along the sweep's size (the length, without a sweep)."""

    session: IfRequested[SessionCost] = ABSENT
    """The cost of the requested session; null if none is requested."""
    omitted: list[Omitted] | None = None
    """Parts that are missing because the deadline passed: ``costs`` (of the last values of the sweep), ``compared``
    (the last alternatives), ``crossovers``. Null if the reply is complete."""

    @property
    def series(self) -> list[Compared]:
        """The compared costs, or those of the request alone."""
        facts = {name: getattr(self, name) for name in Compared.model_fields if name != "label"}
        return self.compared or [Compared(label="request", **facts)]
