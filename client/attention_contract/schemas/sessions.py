"""Decode sessions: pasts that stay on the server. Notation as in ``attention``.

A session holds the keys and values of ``length`` tokens for each of its sequences. A step is a forward pass over new
tokens, whose keys and values are appended when it has succeeded. Source: Kwon et al. 2023 (pages), Pope et al. 2022
(decoding with a cache).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.analyses.attribution import AttributionRequest
from attention_contract.schemas.analyses.effects import EffectsRequest
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensors import Encoding, FloatArray

MAX_SESSION_ID: Final = 64
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)]
Length = Annotated[int, Field(ge=0, lt=2**31)]
MAX_STEPS: Final = 1024
"""The most steps of one request."""
MAX_SEQUENCES: Final = 4096
"""The most sequences of one session."""


class FullPolicy(WireModel):
    """Keep every token."""

    name: Literal["full"] = "full"


class WindowSinks(WireModel):
    """Keep the first ``sinks`` tokens and the last ``window``. Source: Xiao et al. 2024 (StreamingLLM), section 3.2."""

    name: Literal["window_sinks"] = "window_sinks"
    window: int = Field(ge=1, lt=2**31)
    """Number of latest tokens that are kept."""
    sinks: int = Field(default=4, ge=0, lt=2**31)
    """Number of first tokens that are kept."""
    report_error: bool = False
    """Report the difference between each step's output and the output over the whole past, which the session then also
    keeps."""


class HeavyHitters(WireModel):
    """Keep the last ``window`` tokens, and for each key/value head the ``heavy`` tokens that got most weight so far.

    Source: Zhang et al. 2023 (H2O), algorithm 1.
    """

    name: Literal["heavy_hitters"] = "heavy_hitters"
    heavy: int = Field(ge=1, lt=2**31)
    """Number of tokens that are kept for their accumulated weight."""
    window: int = Field(ge=1, lt=2**31)
    """Number of latest tokens that are kept."""
    report_error: bool = False
    """See ``window_sinks``."""


class SnapKV(WireModel):
    """After the first step, keep for each key/value head the tokens that the last queries look at; then keep all.

    The last ``window`` tokens of the first step vote for ``keep`` earlier ones by their weights, pooled over ``kernel``
    neighbours. Source: Li et al. 2024 (SnapKV), section 4.
    """

    name: Literal["snap_kv"] = "snap_kv"
    keep: int = Field(ge=1, lt=2**31)
    """Number of tokens of the first step that are kept in addition to its window."""
    window: int = Field(default=32, ge=1, lt=2**31)
    """Number of last tokens of the first step, which vote and are kept."""
    kernel: int = Field(default=7, ge=1, le=255)
    """Number of neighbouring keys over which votes are pooled by their maximum; odd."""
    report_error: bool = False
    """See ``window_sinks``."""

    @model_validator(mode="after")
    def _odd(self) -> "SnapKV":
        if self.kernel % 2 == 0:
            raise at_fault("kernel", f"expected an odd number, got {self.kernel}")
        return self


Policy = Annotated[FullPolicy | WindowSinks | HeavyHitters | SnapKV, Field(discriminator="name")]


class SessionSource(WireModel):
    """Another session whose past a new one begins with."""

    session: SessionId
    length: Length | None = None
    """The number of its first tokens; default: all."""


class OpenSession(WireModel):
    """Open a session of a module: empty, from a past, or from another session."""

    sequences: int | None = Field(default=None, ge=1, le=MAX_SEQUENCES)
    """Number of sequences, B. Default: that of the past or of the other session, else 1."""
    capacity: Length | None = None
    """Number of tokens for which memory is reserved now; a step beyond it is refused. Default: memory is allocated as
    the session grows, and a step may get 429."""
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds without a request after which the session expires; default and maximum: the server's."""
    policy: Policy = Field(default_factory=FullPolicy)
    """The tokens that the session keeps."""
    pinned: bool = False
    """Never evict the session to free memory, within the server's quota of pinned bytes."""
    share: bool = False
    """Share the memory of equal prefixes with other sessions of the module that also set ``share``: pages of equal
    inputs in equal order are stored once. After a step with edits, new pages are not shared."""
    version: str | None = Field(default=None, max_length=256)
    """Open only if the module is at this version."""
    from_: SessionSource | None = Field(default=None, alias="from")
    """Begin with the past of another session of the same module and version, without copying it."""
    past_key: FloatArray | None = None
    """``[B, Hkv, P, D]`` or ``[Hkv, P, D]``: begin with these keys, like tap ``k``: projected, normed and rotated."""
    past_value: FloatArray | None = None
    """``[B, Hkv, P, Dv]`` or ``[Hkv, P, Dv]``"""

    @model_validator(mode="after")
    def _one_source(self) -> "OpenSession":
        if (self.past_key is None) != (self.past_value is None):
            missing = "past_key" if self.past_key is None else "past_value"
            raise at_fault(missing, "past_key and past_value come together; send both or none")
        if self.from_ is not None and self.past_key is not None:
            raise at_fault("past_key", "a session begins from another session or from a past; send one of them")
        return self


class SessionInfo(WireModel):
    """One session."""

    session: str
    """Its id."""
    module: str
    version: str
    """The version of the module with which the session was opened."""
    sequences: int
    length: int
    """Number of tokens of each sequence so far, including those that the policy dropped."""
    held: int
    """Number of tokens of each sequence whose keys and values are held."""
    capacity: int | None = None
    """Number of tokens for which memory is reserved; null if the session grows."""
    policy: Policy
    pinned: bool
    bytes: int
    """Bytes of the pages that it uses, including shared pages."""
    shared_bytes: int
    """Bytes of these that other sessions use too."""
    own_bytes: int
    """Bytes that become free if the session is deleted."""
    expires_at: str
    """The time, as RFC 3339 in UTC, at which the session expires if no further request arrives."""
    parent: str | None = None
    """The session that it was forked or opened from; null for none."""
    step: str | None = None
    """The id of the last step; null for none."""


class ListSessions(WireModel):
    """The page of the list to read."""

    reads_text: ClassVar[bool] = True

    limit: int = Field(default=100, ge=1, le=250)
    """Number of sessions, at most."""
    cursor: Annotated[str, Field(pattern=r"^\d{1,18}$")] | None = None
    """``next`` of the previous page; default: the first page."""


class SessionList(WireModel):
    """Sessions, the oldest first, and the memory of all. ``parent`` makes the list a tree; a parent may be gone."""

    sessions: list[SessionInfo]
    next: str | None = None
    """The ``cursor`` of the next page; null on the last one."""
    total: int | None = None
    """Number of the caller's sessions on all pages."""
    page_tokens: int
    """Number of tokens of one page."""
    pages: int
    """Number of pages in use."""
    shared_pages: int
    """Number of these that more than one sequence uses."""
    bytes: int
    """Bytes of the pages in use."""


class OverSession(WireModel):
    """A request over the past of a session: it brings no past and no offsets of its own."""

    at: Length | None = None
    """See ``StepRequest``."""

    @model_validator(mode="after")
    def _no_past(self) -> Self:
        held = "the session holds the past"
        for name, reason in {"past_key": held, "past_value": held, "offsets": "the session knows its length"}.items():
            if getattr(self, name) is not None:
                raise at_fault(name, f"{reason}; leave it out")
        return self


class StepRequest(OverSession, ForwardRequest):
    """One forward pass over new tokens, which are appended. It takes no past and no offsets.

    ``Lk`` counts the tokens that the session holds and the new ones. An edit of ``k`` or ``v`` changes what is cached
    of the new tokens; one of earlier tokens holds for this step alone.
    """

    at: Length | None = None
    """The length that the caller expects the session to have; if it differs, the answer is 409 with the actual
    length."""
    step: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A name for this step. If the last step had the same name, its reply is sent again and nothing is appended."""


class SessionStep(StepRequest):
    """One of many steps."""

    session: SessionId


class StepsRequest(WireModel):
    """Steps of many sessions at once, each with its own result. A session may stand there once."""

    steps: Listed[SessionStep] = Field(min_length=1, max_length=MAX_STEPS)
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply, for all of them."""

    @model_validator(mode="after")
    def _distinct(self) -> "StepsRequest":
        names = [step.session for step in self.steps]
        if len(set(names)) != len(names):
            raise at_fault("steps", "a session stands there twice; send its second step after the first")
        return self


class StepReply(ForwardReply):
    """The reply of a forward pass, without the present, and the session's new length."""

    session: str
    length: int
    """Number of tokens of each sequence after the step."""
    warning: IfRequested[str] = ABSENT
    """The reason why a pass without a cache may differ by more than rounding; absent if there is none."""


class StepProblem(WireModel):
    """The problem document of one of many steps, with the session that it is about."""

    model_config = ConfigDict(extra="allow")

    session: str | None = None
    """Null for a message of a stream that could not be read."""
    type: str
    title: str
    status: int
    detail: str
    code: str


def _reply_or_problem(value: Any) -> str:
    if isinstance(value, Mapping):
        return "problem" if "code" in value else "reply"
    return "problem" if isinstance(value, StepProblem) else "reply"


class StepsReply(WireModel):
    """The results of many steps, in the order of the request."""

    steps: list[
        Annotated[
            Annotated[StepReply, Tag("reply")] | Annotated[StepProblem, Tag("problem")],
            Discriminator(_reply_or_problem),
        ]
    ]
    """For each step its reply, or its problem document."""


class ForkSession(WireModel):
    """Copy a session, which shares all full pages with its copy."""

    length: Length | None = None
    """The number of first tokens of the copy; default: all."""
    capacity: Length | None = None
    """See ``OpenSession``."""
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """See ``OpenSession``; default: that of the session."""
    pinned: bool = False
    """See ``OpenSession``."""


class TruncateSession(WireModel):
    """Forget the last tokens, as speculative decoding does after a rejected draft."""

    length: Length
    """The number of tokens to keep."""
    at: Length | None = None
    """See ``StepRequest``."""


class ReorderSession(WireModel):
    """Replace the past of each sequence b by that of sequence ``rows[b]``, as beam search does."""

    rows: Listed[Index] = Field(min_length=1, max_length=MAX_SEQUENCES)
    """For each new sequence the present one that it continues. One may be continued many times, or never; the number
    of rows is the new number of sequences."""
    at: Length | None = None
    """See ``StepRequest``."""


class SessionWeightsRequest(OverSession, WeightsRequest):
    """Ask for the weights of new tokens over the cached past. Nothing is appended."""


class SessionEffectsRequest(OverSession, EffectsRequest):
    """Ask for the effects of a sweep of edits on new tokens over the cached past. Nothing is appended."""


class SessionAttributionRequest(OverSession, AttributionRequest):
    """Ask for the share of each weight of new tokens over the cached past. Nothing is appended."""


class SessionGradientsRequest(OverSession, GradientsRequest):
    """Ask for gradients of new tokens over the cached past. Nothing is appended.

    ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
    """


class SessionCache(WireModel):
    """The keys and values that a session holds, in the module's dtype."""

    session: str
    version: str
    length: int
    past_key: FloatArray
    """``[B, Hkv, P, D]``, projected, normed and rotated. P is what is held."""
    past_value: FloatArray
    """``[B, Hkv, P, Dv]``"""


class ReplaceCache(WireModel):
    """Replace the whole past of a session of policy ``full``."""

    past_key: FloatArray
    """``[B, Hkv, P, D]`` or, of one sequence, ``[Hkv, P, D]``"""
    past_value: FloatArray
    """``[B, Hkv, P, Dv]`` or ``[Hkv, P, Dv]``"""
    version: str | None = Field(default=None, max_length=256)
    """Replace only if the session is at this version of its module."""
