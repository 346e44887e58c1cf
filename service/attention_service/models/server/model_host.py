"""The device, the memory and the settings that all models of a server share."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol

from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.budget import Budget

ModelEvent = Literal["loads", "failed_loads", "deaths", "outgrown", "evictions", "idle_ends"]


class Holder(Protocol):
    """A process that holds memory of the budget."""

    bytes: int
    """Bytes that it holds."""
    kept: int
    """Bytes among these that are kept for replies."""
    used: float
    """Time of its last use. The least recently used one gives way first."""

    @property
    def is_unused(self) -> bool:
        """True if its memory can be freed now."""

    def give_back(self) -> None:
        """Free what is kept for replies."""

    def give_way(self) -> None:
        """End soon, for its memory is needed."""


@dataclass
class Host:
    """The device, the memory and the settings that all models of a server share."""

    device: Device
    budget: Budget
    idle_s: float
    """Seconds without a request after which a model ends."""
    stuck_s: float
    """Seconds without progress after which a process is ended."""
    generated_tokens: int = 0
    counts: Counter[ModelEvent] = field(default_factory=Counter)
    holders: set[Holder] = field(default_factory=set)
    """The models that hold memory of the budget, and the spare process."""
    bytes: int = 0
    """Bytes that they hold."""

    def hold(self, holder: Holder, size: int) -> None:
        """Note how many bytes a model, or the spare process, holds from now on."""
        self.bytes += size - holder.bytes
        holder.bytes = size
        (self.holders.add if size else self.holders.discard)(holder)
        self.budget.reclaimable = self._reclaimable if self.holders else None
        self.budget.used_by_models = self._used if self.holders else None
        self.budget.reclaim = self._reclaim if self.holders else None

    def _reclaimable(self) -> int:
        """Bytes of models that nobody uses, and those that other models keep for replies."""
        return sum(each.bytes if each.is_unused else each.kept for each in self.holders)

    def _used(self) -> int:
        return self.bytes - self._reclaimable()

    def _reclaim(self, need: int) -> None:
        """Free what is kept for replies, then end the spare process and the least recently used models for so much."""
        for holder in list(self.holders):
            need -= holder.kept
            holder.give_back()
        for holder in sorted(self.holders, key=lambda each: each.used):
            if need <= 0:
                return
            if holder.is_unused:
                need -= holder.bytes
                holder.give_way()
