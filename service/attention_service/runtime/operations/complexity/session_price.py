"""The price of a session of a module: bytes of pages, the longest past that fits, and the time of a step."""

from dataclasses import dataclass, replace

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.complexity import SessionCost, SessionShape, SessionStepCost
from attention_contract.schemas.sessions import FullPolicy
from attention_contract.spec import AttentionSpec
from attention_service.core.kv_cache.attention import in_place_fault
from attention_service.core.kv_cache.policies import Keeper, keeper_of
from attention_service.core.kv_cache.slab import page_tokens
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Widths
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Estimate, kv_cache_bytes_per_token
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.recurrence_binding import check_past
from attention_service.runtime.operations.complexity.alternatives import renamed
from attention_service.runtime.operations.complexity.capacity import last_that
from attention_service.runtime.operations.complexity.shape_cost import milliseconds
from attention_service.runtime.operations.complexity.subjects import LARGEST_SIZE, OUTPUT, Subject
from attention_service.runtime.operations.complexity.valid_sizes import at
from attention_service.runtime.planning.blank_requests import new_request
from attention_service.runtime.planning.request_sizes import RequestSizes


def price(subject: Subject, shape: SessionShape) -> SessionCost:
    """Return the price of a session.

    Raises InvalidRequest for raw attention, and for a policy or a past that the spec does not allow.
    """
    base = subject.base
    if base.module is None:
        raise InvalidRequest.at(
            "session", "a session belongs to a module; leave it out, or ask for the complexity of a module"
        )
    check_past(base.spec, "session")
    try:
        keeper = keeper_of(shape.policy, base.spec, base.kv_heads, base.heads)
    except InvalidRequest as fault:
        raise renamed(fault, "session.policy") from None
    one = at(at(at(base, "batch", shape.sequences), "past", 0), "length", 1)
    return _Priced(replace(subject, base=one, kernel=None), shape, keeper).cost()


@dataclass(frozen=True)
class _Priced:
    """A session whose steps append one token to each sequence."""

    subject: Subject
    """A step without a past."""
    shape: SessionShape
    keeper: Keeper | None

    def cost(self) -> SessionCost:
        """Return the whole price."""
        most = POSITIONS.of(self.subject.base.spec.position).length or LARGEST_SIZE
        longest = last_that(lambda tokens: self._bytes(tokens, self._most_held(tokens)) <= self._free, most)
        return SessionCost(
            token_bytes=kv_cache_bytes_per_token(self.subject.base),
            page_tokens=self._page,
            free_bytes=self._free,
            longest=None if longest == LARGEST_SIZE else longest,
            steps=[self._step(index, past) for index, past in enumerate(self.shape.pasts)],
        )

    @property
    def _free(self) -> int:
        place = self.subject.place
        return place.free if place.session_free is None else place.session_free

    @property
    def _page(self) -> int:
        return page_tokens(self.subject.place.device.torch)

    @property
    def _keeps_whole(self) -> bool:
        """True if the session keeps every token beside those of its policy."""
        return not isinstance(self.shape.policy, FullPolicy) and self.shape.policy.report_error

    def _held(self, past: int) -> int:
        """Tokens that are held after one step appended the past."""
        return past if self.keeper is None else min(past, self.keeper.most)

    def _most_held(self, tokens: int) -> int:
        """Tokens that are held at once on the way to so many, by steps of one token, or one step if that chooses."""
        return tokens if self.keeper is None or self.keeper.grows else min(tokens, self.keeper.most + 1)

    def _bytes(self, tokens: int, held: int) -> int:
        """Bytes of pages for ``tokens``, of which ``held`` are held."""
        pages = -(-held // self._page) + (-(-tokens // self._page) if self._keeps_whole else 0)
        return pages * self._page * self.shape.sequences * kv_cache_bytes_per_token(self.subject.base)

    def _step(self, index: int, past: int) -> SessionStepCost:
        held = self._held(past)
        try:
            self.subject.at("past", past)
            seconds = self._seconds(held)
            if self._keeps_whole:
                seconds += self._seconds(past)
            if self._votes(past):
                seconds += self._general(held, "weights")
        except InvalidRequest as fault:
            raise renamed(fault, f"session.pasts.{index}") from None
        return SessionStepCost(
            past=past, held=held, bytes=self._bytes(past + 1, held + 1), predicted=milliseconds(seconds)
        )

    def _votes(self, past: int) -> bool:
        """True if the policy needs the step's weights; one that grows chooses after the first step alone."""
        if self.keeper is None or (self.keeper.grows and past):
            return False
        return self.keeper.wants(1, past) is not None

    def _seconds(self, held: int) -> Estimate:
        """The time of a step over so many tokens: in place if the spec allows it, else by a forward pass."""
        base, subject = self.subject.base, self.subject
        if in_place_fault(base.spec, TORCH_DTYPES[base.dtype]) is not None:
            return self._general(held, "output")
        widths = Widths(base.heads, base.kv_heads, base.head_dim, base.value_dim)
        tokens = RequestSizes(base.batch, 1, held + 1)
        raw = new_request(AttentionSpec(), widths, base.dtype, tokens, threads=base.threads)
        return self._general(0, "output") + self._forward(raw, subject.kernel_of(raw), OUTPUT)

    def _general(self, held: int, tap: str) -> Estimate:
        """The time of a forward pass over a past of so many tokens."""
        bound = self.subject.at("past", held)
        return self._forward(bound, self.subject.kernel_of(bound), frozenset({tap}))

    def _forward(self, bound: BoundRequest, kernel: str, taps: frozenset[str]) -> Estimate:
        return self.subject.time(self.subject.forward(bound, kernel, taps), bound, kernel)
