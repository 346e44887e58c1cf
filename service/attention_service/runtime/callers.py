"""The caller of a request: who asks, as the doors found out, for whoever shares something out between callers."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from attention_contract.errors import CallerLimit
from attention_contract.schemas.server import CallerLimits

UNLIMITED: Final = CallerLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody whose requests count together."""

    name: str
    """The name of an API key, or an address where no key is needed. Sessions and recordings belong to it."""
    manages: bool = True
    """True if the caller may see and end what belongs to others."""
    limits: CallerLimits = UNLIMITED

    def may_use(self, owner: str) -> bool:
        """Return True if what belongs to this owner is the caller's, or everybody's is."""
        return self.manages or owner == self.name

    def check(self, limit: str, used: float, what: str) -> None:
        """Raise CallerLimit if the caller would have used more than this limit of its ``limits`` allows."""
        most = getattr(self.limits, limit)
        if most is not None and used > most:
            raise CallerLimit(f"{what}; the limit {limit} of {self.name!r} is {most:g}", limit=most, actual=used)


ANYONE: Final = Caller("anyone")
caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
"""The caller of the request that runs. A door sets it before it calls the engine."""
