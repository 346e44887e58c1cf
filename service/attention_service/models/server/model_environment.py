"""The device, the memory and the settings that all models of a server share."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from attention_service.models.server.model_memory import ModelMemory
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.prediction_accuracy import Accuracy
from attention_service.runtime.scheduling.budget import Budget

ModelEvent = Literal["loads", "failed_loads", "deaths", "outgrown", "evictions", "idle_ends"]


_LEAST_PREFIXES: Final = 2**25
"""Bytes that even a small model may keep: a thousand tokens and more."""


class KeptPrefixes(NamedTuple):
    """The part of texts that have ended that each model keeps."""

    bytes: int = 0
    """The most memory of one model for their keys and values."""
    shared: bool = False
    """True if all callers read on from them, and not only whose text it was."""

    def of(self, tensor_bytes: int) -> int:
        """The memory of a model whose tensors take so much: keys and values grow with it."""
        return min(self.bytes, max(_LEAST_PREFIXES, tensor_bytes // 4))


NO_PREFIXES: Final = KeptPrefixes()


@dataclass
class ModelEnvironment:
    """The device, the memory and the settings that all models of a server share, and counts of what happened."""

    device: Device
    memory: ModelMemory
    idle_s: float
    """Seconds without a request after which a model ends."""
    stuck_s: float
    """Seconds without progress after which a process is ended."""
    prefixes: KeptPrefixes = NO_PREFIXES
    budget: Budget = field(init=False)
    """The budget of which models hold memory."""
    accuracy: Accuracy = field(default_factory=Accuracy)
    """The times of requests beside their predictions."""
    generated_tokens: int = 0
    counts: Counter[ModelEvent] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.budget = self.memory.budget

    async def give_back_cached(self, need: int) -> None:
        """Free memory of a GPU that PyTorch keeps for this process, where a model's cannot take it."""
        await asyncio.to_thread(self.device.give_back_cached, need)
