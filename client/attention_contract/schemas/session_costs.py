"""The price of a session: bytes of its cache, the longest past that fits, and the time of a step."""

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.schemas.answers import Milliseconds
from attention_contract.schemas.sessions import MAX_SEQUENCES, FullPolicy, Length, Policy


class SessionShape(WireModel):
    """A session to price. Its steps append one token to each sequence."""

    sequences: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    policy: Policy = Field(default_factory=FullPolicy)
    pasts: Listed[Length] = Field(default_factory=lambda: [0, 1024, 4096, 16_384], min_length=1, max_length=64)
    """Numbers of earlier tokens, each appended by one step, at which a step is priced."""


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
    """The price of one session of a module."""

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
    """The price of a step, in the order of ``pasts``."""
