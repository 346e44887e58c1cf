"""The counts and times of a model's inferences, as Triton's statistics have them."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attention_contract.schemas.attention import Ran
from attention_service.api.oip.model_questions import VERSION

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass(slots=True)
class ModelStatistics:
    """The inferences of one model by this protocol since the server's start."""

    counts: Counter[str] = field(default_factory=Counter)
    nanoseconds: Counter[str] = field(default_factory=Counter)
    executions: float = 0.0
    """Passes on the device; of a pass that requests shared, each counts its part."""
    last_ms: int = 0
    """The time of the last inference, in milliseconds since the epoch."""

    def add(self, ran: Ran, read_s: float, write_s: float) -> None:
        """Count an inference. ``read_s`` and ``write_s``: seconds to read its inputs and to write its outputs."""
        seconds = {
            "compute_input": read_s,
            "queue": ran.queue_ms / 1e3,
            "compute_infer": ran.compute_ms / 1e3,
            "compute_output": write_s,
        }
        self.executions += 1 / ran.batch
        self._count(seconds | {"success": sum(seconds.values())})

    def fail(self, seconds: float) -> None:
        """Count an inference that was answered with an error."""
        self._count({"fail": seconds})

    def _count(self, seconds: dict[str, float]) -> None:
        self.counts.update(seconds.keys())
        self.nanoseconds.update({phase: round(1e9 * each) for phase, each in seconds.items()})
        self.last_ms = time.time_ns() // 10**6

    def report(self, name: str) -> dict[str, Any]:
        """The statistics of a model of this name. The server keeps no replies, so nothing hits or misses a cache."""
        return {
            "name": name,
            "version": VERSION,
            "last_inference": self.last_ms,
            "inference_count": self.counts["success"],
            "execution_count": round(self.executions),
            "inference_stats": {
                phase: {"count": self.counts[phase], "ns": self.nanoseconds[phase]} for phase in _PHASES
            },
            "batch_stats": [],
            "memory_usage": [],
        }
