"""One decode session: its module, its block tables, and what became of its last step."""

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter

import numpy as np

from attention_contract.base import WireModel
from attention_contract.schemas.sessions import Policy, SessionInfo, StepReply
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.pages import Pages
from attention_service.core.kv_cache.policies import Keeper
from attention_service.core.kv_cache.slab import PageKind
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.resident import Module
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.jobs import JobEnd
from attention_service.runtime.sessions.shared_prefixes import Prefix


def page_kind(module: Module) -> PageKind:
    """The kind of the pages that a module's keys and values take."""
    sizes = module.sizes
    dtype = TORCH_DTYPES[module.config.dtype or "float32"]
    return PageKind(sizes.kv_heads, sizes.head_dim, sizes.value_dim, dtype, module.device)


@dataclass(eq=False)
class DecodeSession:
    """A past that stays on the server. Used from the event loop only."""

    id: str
    module: Module
    """At the version with which the session was opened."""
    tables: list[BlockTable]
    """One for each sequence, with as many tokens each."""
    policy: Policy
    ttl_s: float
    keeper: Keeper | None = None
    """The state of the policy; None for ``full``."""
    whole: list[BlockTable] | None = None
    """All tokens of each sequence, if the policy reports its error."""
    prefixes: list[Prefix] | None = None
    """For each sequence the names of its full pages; None if it shares no more."""
    length: int = 0
    """Tokens of each sequence so far, those that the policy dropped included."""
    capacity: int | None = None
    pinned: bool = False
    parent: str | None = None
    owner: str = field(default_factory=lambda: caller.get().name)
    """The name of the caller who opened it."""
    used_at: float = field(default_factory=time.monotonic)
    """Seconds of ``time.monotonic`` at the end of the last request."""
    step: str | None = None
    """Id of the last step."""
    began: int = 0
    """Tokens of each sequence before the last step."""
    reply: StepReply | None = None
    """The reply to the last step, if it had an id and the reply is small."""
    reply_bytes: int = 0
    """Bytes of its tensors."""
    serial: int = 0
    """Its number among all that were opened, from 1 on."""
    counted: int = 0
    """Bytes of this session in the sums of ``PageBudget``."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request that may read or change the session."""
    running: JobEnd | None = None
    """The end of the last job, which may run on after its caller left."""
    gone: str | None = None
    """The reason why the session is gone; None while it is there."""

    @property
    def held(self) -> int:
        """Tokens of each sequence whose keys and values are held."""
        return self.tables[0].tokens

    @property
    def all_tables(self) -> list[BlockTable]:
        """Every block table of the session."""
        return [*self.tables, *(self.whole or ())]

    @property
    def expires(self) -> float:
        """Seconds of ``time.monotonic`` at which the session expires."""
        return self.used_at + self.ttl_s

    @property
    def bytes(self) -> int:
        """Bytes of the pages that it uses, and of the kept reply."""
        size, last, slab = self.reply_bytes, 0, None
        for run in self.runs:
            if run.slab is not slab:
                slab, last = run.slab, 0
            stop = run.first + run.count
            size += max(stop - max(run.first, last), 0) * run.slab.kind.page_bytes
            last = max(stop, last)
        return size

    def touch(self) -> None:
        """Let the time until it expires begin anew."""
        self.used_at = time.monotonic()

    def clear(self) -> None:
        """Give back all pages."""
        for table in self.all_tables:
            table.clear()

    @property
    def runs(self) -> list[Pages]:
        """The pages of all tables, in the order of slabs and places."""
        runs: list[Pages] = []
        for table in self.all_tables:
            runs += table.pages
        return sorted(runs, key=lambda run: (id(run.slab), run.first)) if len(runs) > 1 else runs

    def _pages(self) -> tuple[int, int]:
        """The number of pages that only this session uses, and of those that others use too."""
        own = shared = 0
        for slab, runs in groupby(self.runs, attrgetter("slab")):
            page_runs = list(runs)
            first = page_runs[0].first
            times = np.zeros(max(run.stop for run in page_runs) - first, np.int32)
            for run in page_runs:
                times[run.first - first : run.stop - first] += 1
            used = times > 0
            others = int((slab.users[first : first + len(times)] > times)[used].sum())
            shared += others
            own += int(used.sum()) - others
        return own, shared

    def info(self) -> SessionInfo:
        """Return the session's description on the wire."""
        own, shared = (pages * page_kind(self.module).page_bytes for pages in self._pages())
        left = timedelta(seconds=self.expires - time.monotonic())
        return SessionInfo(
            session=self.id,
            module=self.module.name,
            version=self.module.version,
            sequences=len(self.tables),
            length=self.length,
            held=self.held,
            capacity=self.capacity,
            policy=self.policy,
            pinned=self.pinned,
            bytes=own + shared,
            shared_bytes=shared,
            own_bytes=own,
            expires_at=(datetime.now(UTC) + left).isoformat(timespec="milliseconds"),
            parent=self.parent,
            step=self.step,
        )


def bytes_of(reply: WireModel) -> int:
    """Bytes of the tensors of a reply."""
    values = reply.__dict__.values()
    return sum(bytes_of(value) if isinstance(value, WireModel) else getattr(value, "nbytes", 0) for value in values)
