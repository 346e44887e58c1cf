"""Forward passes, and what requests for weights and gradients share with them.

Notation for shapes: B batch, H query heads, Hkv key/value heads, Lq queries, Lk keys (the past included), P past keys,
D head width, Dv value width. Wherever B stands it may be missing, and is then missing in the reply.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import AnyNumber, Array, BoolArray, Encoding, FloatArray, IntArray, MaskArray

Tap = Literal["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "lse", "output"]
"""The points along one attention, in order."""

EditableTap = Literal[
    "q",
    "k",
    "v",
    "scores",
    "capped_scores",
    "masked_scores",
    "weights",
    "context",
    "output",
    "gate",
    "index_scores",
    "mlp",
    "router",
    "hidden",
    "embeddings",
]
"""The taps that an edit can change. Only layers of whole models may have ``gate`` to ``hidden``, and only whole models
``embeddings``."""
KernelName = Annotated[str, Field(min_length=1, max_length=64)]
"""The name of a registered kernel: ``GET /v1/variants`` lists them, those of installed packages among them."""
MAX_INDICES: Final = 65_536
"""The most items of one list of heads, queries or keys."""
MAX_LABELS: Final = 65_536
"""The most labels of tokens in one request."""
TokenLabel = Annotated[str, Field(max_length=256)]
MAX_EDITS: Final = 256
"""The most edits of one attention."""
MAX_TAPS: Final = 64
"""The most items of one list of taps, repeated ones included."""


_WHOLE_TAPS: Final = frozenset({"output"})
"""The tap that ``select`` does not narrow."""
_WITHOUT_QUERIES: Final = _WHOLE_TAPS | {"k", "v"}
"""The taps that selected queries do not narrow."""
output_only: Final[Callable[[], list[Tap]]] = partial(list[Tap], ("output",))
"""Makes the taps that a request returns by default."""


class Select(WireModel):
    """The heads and queries of the returned taps to keep, in the order given.

    ``heads`` narrows every tap that has heads; ``k`` and ``v`` then give one entry for each selected query head: the
    key/value head that it reads. ``queries`` narrows every tap that has queries, except ``output``.
    """

    heads: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Indices of heads to keep, from 0; default: all."""
    queries: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Indices of queries to keep, the rows of the weights, from 0; default: all."""


class WeightsSelect(Select):
    """The heads, queries and keys of the returned weights to keep, in the order given."""

    keys: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Indices of keys to keep, the columns of the weights, from 0; default: all. The weights do not change: those of a
    query over the kept keys need not sum to 1."""

    @model_validator(mode="before")
    @classmethod
    def _of_heads_and_queries(cls, value: Any) -> Any:
        return value.model_dump(exclude_unset=True) if type(value) is Select else value


VectorId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""The id of a steering vector."""


class AddedVector(WireModel):
    """The direction of a layer in a steering vector of a whole model."""

    vector: VectorId
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """The number by which the direction is multiplied."""


def _kind_of_added(value: Any) -> str:
    named = isinstance(value, AddedVector) or (isinstance(value, Mapping) and "vector" in value)
    return "AddedVector" if named else "numbers"


Added = Annotated[
    Annotated[FloatArray, Tag("numbers")] | Annotated[AddedVector, Tag("AddedVector")], Discriminator(_kind_of_added)
]


class Edit(WireModel):
    """One intervention on a tap before the rest is computed: one of ``set``, ``value``, ``scale`` and ``add``."""

    tap: EditableTap
    heads: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Heads to edit; null for all. For ``k`` and ``v`` these are key/value heads."""
    queries: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Query rows to edit; null for all."""
    keys: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Keys to edit; null for all."""
    experts: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Experts to edit, of tap ``router``; null for all."""
    set: float | None = None
    """Set the selected part to this number (0 knocks it out)."""
    value: FloatArray | None = None
    """Replace the selected part by this tensor, with broadcasting."""
    scale: float | None = None
    """Multiply by this number."""
    add: Added | None = None
    """Add this number, this tensor, with broadcasting, or ``{"vector", "scale"}``: the direction of the edit's layer in
    a steering vector of a whole model."""
    renormalize: bool = False
    """After an edit of ``weights``: divide each row by its sum."""

    @model_validator(mode="after")
    def _one_action(self) -> "Edit":
        given = [name for name in ("set", "value", "scale", "add") if getattr(self, name) is not None]
        if not given:
            raise ValueError("expected exactly one of set, value, scale and add")
        if len(given) > 1:
            raise at_fault(given[1], f"expected exactly one of set, value, scale and add; got {' and '.join(given)}")
        if self.renormalize and self.tap != "weights":
            raise at_fault("renormalize", "it applies to weights only")
        return self

    @property
    def tensor(self) -> Array | None:
        """The tensor that replaces the selected part or is added to it; None for a number."""
        if self.value is not None:
            return self.value
        return None if self.added is None or np.ndim(self.added) == 0 else self.added

    @property
    def added(self) -> Array | None:
        """The number or tensor that is added; None for a vector, whose numbers are not known yet."""
        return None if isinstance(self.add, AddedVector) else self.add


class AttentionInputs(WireModel):
    """The inputs of one attention of a module."""

    query: FloatArray
    """``[B, Lq, d_model]``"""
    key: FloatArray | None = None
    """``[B, Lk − P, key_width]``; default: the query (self-attention)."""
    value: FloatArray | None = None
    """``[B, Lk − P, value_width]``; default: the key."""
    mask: MaskArray | None = None
    """Broadcastable to ``[B, H, Lq, Lk]``. Bool: true lets a query look. Float: added to the scores. A last dimension
    shorter than the keys (and not 1) hides the rest. −∞ hides a key; +∞ makes the weights and the output of its query
    NaN and its ``lse`` +∞, but for a sigmoid, whose weight there is 1."""
    key_mask: BoolArray | None = None
    """``[B, Lk]``, true for a real key, false for padding. Integers 0 and 1 are accepted."""
    key_lengths: IntArray | None = None
    """``[B]``: the number of real keys, counted from the first; later keys are padding."""
    global_mask: BoolArray | None = None
    """``[B, Lk]``, true for a global token of its sequence, past keys included: it sees every key and every query sees
    it. These tokens are added to the positions of ``global_tokens`` in the spec, and use its projections. If the spec
    has no ``global_tokens``, they see and are seen also where the masks of the spec forbid it."""
    past_key: FloatArray | None = None
    """``[B, Hkv, P, D]``: keys of earlier tokens, like tap ``k``: projected, normed and rotated. They precede the new
    ones."""
    past_value: FloatArray | None = None
    """``[B, Hkv, P, Dv]``"""
    gate: FloatArray | None = None
    """``[B, Hkv, Lk]`` or ``[B, Hkv, Lk, D]`` in every layout, in (0, 1]: the factor by which each key decays the
    state. For method ``linear`` with a gated rule in raw attention; a module computes its own gate."""
    beta: FloatArray | None = None
    """``[B, Hkv, Lk]``: the share of the stored value that each key replaces, for a delta rule in raw attention; a
    module computes its own."""
    initial_state: FloatArray | None = None
    """``[B, Hkv, F, Dv]``: the state before the first key, for method ``linear`` with F features (F = D); default:
    zeros. The reply then has the state after the last key."""
    initial_normalizer: FloatArray | None = None
    """``[B, Hkv, F]``: the sum of features that belongs to ``initial_state``, if the method normalizes."""
    offsets: IntArray | None = None
    """``[B]`` or one number, added to the query's index in every positional mask and position encoding; default: P. May
    be negative."""
    positions: IntArray | None = None
    """``[B, Lq]``: the position of each new token in the position encoding, as query and as key. Default: i + offset
    for a query, and the index among all keys for a key."""
    parameters: dict[str, FloatArray] = Field(default_factory=dict)
    """Parameters by name. For raw attention: every learned tensor of the spec. For a module: some or all parameters in
    the module's shapes, cast to its dtype, which replace its own for this request only."""
    version: str | None = Field(default=None, max_length=256)
    """Refuse the request unless the module is at this version."""
    kernel: KernelName | None = None
    """Use this kernel; default: the fastest one that can compute the request."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""


class Dropout(WireModel):
    """Weights put to zero at random, the others divided by 1 − p (Srivastava et al. 2014).

    Which, depends on the seed and on the indices of sequence, head, query and key alone: the same request drops the
    same, on every device and with every kernel that can. The tap ``weights`` is what they are before.
    """

    p: float = Field(ge=0, lt=1, allow_inf_nan=False)
    """The probability with which each weight is dropped."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    return_mask: bool = False
    """Return ``dropout_mask``: the mask of kept weights, for the selected heads and queries."""


class TapsRequest(AttentionInputs):
    """One attention of a module, edited, and the taps of it to return."""

    dropout: Dropout | None = None
    """Drop weights; default: none."""
    edits: Listed[Edit] = Field(default_factory=list, max_length=MAX_EDITS)
    """Applied in the order of the taps, then in the order given."""
    return_: Listed[Tap] = Field(default_factory=output_only, alias="return", min_length=1, max_length=MAX_TAPS)
    """The taps to return."""
    select: Select | None = None
    """The heads and queries of those taps; default: all."""
    average_heads: bool = False
    """Return ``weights`` averaged over the (selected) heads, without the head dimension."""
    return_state: bool = False
    """Return the state after the last key, for method ``linear``; it is also returned if an initial state was sent."""
    report_error: bool = False
    """Compare an approximate method with exact attention over the same inputs, block by block."""

    @model_validator(mode="after")
    def _narrows_something(self) -> "TapsRequest":
        if self.average_heads and "weights" not in self.return_:
            raise at_fault("average_heads", "it averages returned weights; add weights to return, or leave it out")
        if self.select is None or (self.dropout is not None and self.dropout.return_mask):
            return self
        without = _WITHOUT_QUERIES if self.select.heads is None else _WHOLE_TAPS
        if without.issuperset(self.return_):
            raise at_fault("select", "it narrows returned taps, such as weights; add one to return, or leave it out")
        return self


class ForwardRequest(TapsRequest):
    """One forward pass through a module."""

    compare: Literal["unedited"] | None = None
    """``unedited``: return ``differences`` too, the returned taps after the edits minus those without them."""


class TokenLabels(WireModel):
    """The labels of tokens in a picture of the reply, equal for all sequences."""

    labels: Listed[TokenLabel] | None = Field(default=None, max_length=MAX_LABELS)
    """A label for each of the Lk keys, including past keys."""
    query_labels: Listed[TokenLabel] | None = Field(default=None, max_length=MAX_LABELS)
    """A label for each of the Lq queries. Default: those of the last keys, if the request has no ``key``."""


class TextLabels(WireModel):
    """The labels of the tokens of a text in a picture of the reply, equal for all texts."""

    labels: Listed[TokenLabel] | None = Field(default=None, max_length=MAX_LABELS)
    """A label for each token, padding included."""


def token_counts(inputs: "AttentionInputs", past: int = 0) -> tuple[int, int]:
    """The queries and keys of a request, the past included: its own, and so many tokens of a session."""
    keys = inputs.query if inputs.key is None else inputs.key
    past += 0 if inputs.past_key is None else inputs.past_key.shape[-2]
    return inputs.query.shape[-2], keys.shape[-2] + past


class RawInputs(WireModel):
    """The inputs of raw attention: q, k and v as they are, with their spec.

    Layouts: ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk, D]``, ``value [B, Hkv, Lk, Dv]``; or, with ``num_heads`` given,
    ``[B, L, H·D]``. Without ``num_heads``, ``[Lq, D]`` is one head of one sequence. The reply keeps the query's layout.
    An additive or bilinear score takes keys of another width than D.
    """

    spec: AttentionSpec = Field(default_factory=AttentionSpec)
    """The computation."""
    num_heads: int | None = Field(default=None, ge=1)
    """Tensors have the layout ``[B, L, H·D]`` with this H."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key/value heads of that layout; default: ``num_heads``."""


class RawForwardRequest(RawInputs, ForwardRequest):
    """One attention over raw q, k and v."""


class Ran(WireModel):
    """The run of a request, with predicted and measured times."""

    kernel: str
    """The kernel that computed the output; for an approximate method, the name of the method."""
    device: str
    dtype: str
    """The dtype of the computation."""
    tf32: IfRequested[bool] = ABSENT
    """True if a GPU rounded float32 factors of products to TF32, as the server's setting ``tf32`` lets it."""
    version: str | None = None
    """The module's version; null for raw attention, and for a request with its own parameters."""
    flops: int
    """Floating-point operations of the kernel that ran, projections included."""
    predicted_ms: float
    """The predicted median of ``compute_ms``."""
    predicted_low_ms: float
    predicted_high_ms: float
    """Nine of ten runs should take between ``predicted_low_ms`` and ``predicted_high_ms``."""
    compute_ms: float
    """Milliseconds on the device, without queueing."""
    cpu_ms: float = 0.0
    """Milliseconds of ``compute_ms`` during which the computing thread had a processor. On a CPU, a much smaller number
    than ``compute_ms`` means that other programs used the processor. On a GPU, it is the time to launch the work."""
    queue_ms: float
    """Milliseconds between admission and execution."""
    batch: int
    """The number of requests that ran in one pass. Times are those of the whole pass; FLOPs and bytes are those of this
    request."""
    peak_bytes: int
    """Peak memory that the request was admitted for, in bytes: the cost model's estimate."""


class Taps(WireModel):
    """The requested taps."""

    q: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, D]``: queries after projection, norm and position."""
    k: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, Lk, D]``: keys after projection, norm and position, the past included."""
    v: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, Lk, Dv]``: values after projection, the past included."""
    scores: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]``: score times scale."""
    capped_scores: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]``: after the softcap; equal to the scores without a softcap."""
    masked_scores: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]``: after bias and masks; −∞ where a query may not look."""
    weights: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]``, or ``[B, Lq, Lk]`` averaged over heads. An infinity or NaN in a key, or in its value, makes
    the weights of the queries that may look at it NaN; a sigmoid's at that key alone."""
    context: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Dv]``: the weighted sum of the values, by head."""
    lse: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq]``: log Σ exp(masked_scores / temperature); −∞ for a query that may look nowhere, and NaN for one
    that may look at a key with an infinity or NaN in it or in its value. Softmax only."""
    output: IfRequested[FloatArray] = ABSENT
    """``[B, Lq, d_model]`` of a module; raw attention keeps the query's layout."""


class ApproximationError(WireModel):
    """The error of a method's output against exact attention over the same inputs."""

    max: AnyNumber
    """The largest absolute difference."""
    rms: AnyNumber
    """The root of the mean squared difference."""
    mean_kl: AnyNumber | None = None
    """The mean over all queries of KL(exact weights || approximate weights) in nats, where the method amounts to
    weights that are never negative: ``performer``, and ``linear`` with rule ``sum``, normalized, without an initial
    state. Null for the others; infinite where a weight is 0 that should not be, NaN where no query may look
    anywhere."""


class ForwardReply(Taps, DrawableReply):
    """One field for each returned tap."""

    differences: IfRequested[Taps] = ABSENT
    """The effect of the edits, with ``compare``: each returned tap with the edits minus the same tap without them. 0
    where both are −∞, as for masked scores."""

    present_key: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, Lk, D]``: past and new keys, if the request has a past."""
    present_value: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, Lk, Dv]``"""
    dropout_mask: IfRequested[BoolArray] = ABSENT
    """``[B, H, Lq, Lk]``, true for a weight that is kept, with ``dropout.return_mask``."""
    final_state: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, F, Dv]``: the state after the last key, in float32 or wider; to be sent as ``initial_state``."""
    final_normalizer: IfRequested[FloatArray] = ABSENT
    """``[B, Hkv, F]``: the normalizer of ``final_state``, if the method normalizes."""
    error: IfRequested[ApproximationError] = ABSENT
    """The error of an approximate method, with ``report_error``."""
    ran: Ran


EXAMPLE_INPUTS: dict[str, Any] = {
    "query": [[1.0, 0.0], [0.0, 1.0]],
    "key": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
    "value": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "spec": {"score": {"name": "dot"}},
}
"""A raw attention small enough to follow by hand."""
EXAMPLE_REPLY: dict[str, Any] = {
    "weights": [[0.42231882, 0.15536241, 0.42231882], [0.15536241, 0.42231882, 0.42231882]],
    "output": [[3.0, 4.0], [3.5339131, 4.533913]],
    "ran": {
        "kernel": "fused",
        "device": "cpu",
        "dtype": "float32",
        "flops": 78,
        "predicted_ms": 0.32,
        "predicted_low_ms": 0.16,
        "predicted_high_ms": 0.64,
        "compute_ms": 0.57,
        "cpu_ms": 0.55,
        "queue_ms": 0.02,
        "batch": 1,
        "peak_bytes": 4250,
    },
}
"""The reply to those inputs, with their weights."""
