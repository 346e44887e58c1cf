"""The counts and times of a model's inferences, as Triton's statistics have them."""

import time
from dataclasses import dataclass, field
from typing import Any

from attention_contract.schemas.attention import Ran
from attention_service.api.doors.oip.model_questions import VERSION

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
"""The server keeps no replies, so nothing hits or misses a cache."""


@dataclass(slots=True)
class ModelStatistics:
    """The inferences of one model by this protocol since the server's start."""

    inferences: int = 0
    failures: int = 0
    executions: float = 0.0
    """Passes on the device; of a pass that requests shared, each counts its part."""
    last_ms: int = 0
    """The time of the last inference, in milliseconds since the epoch."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))

    def add(self, ran: Ran, read_s: float, write_s: float) -> None:
        """Count an inference. ``read_s`` and ``write_s``: seconds to read its inputs and to write its outputs."""
        queue_s, compute_s, seconds = ran.queue_ms / 1e3, ran.compute_ms / 1e3, self.seconds
        self.inferences += 1
        self.executions += 1 / ran.batch
        self.last_ms = time.time_ns() // 10**6
        seconds["compute_input"] += read_s
        seconds["queue"] += queue_s
        seconds["compute_infer"] += compute_s
        seconds["compute_output"] += write_s
        seconds["success"] += read_s + queue_s + compute_s + write_s

    def fail(self, seconds: float) -> None:
        """Count an inference that was answered with an error."""
        self.failures += 1
        self.last_ms = time.time_ns() // 10**6
        self.seconds["fail"] += seconds

    def report(self, name: str) -> dict[str, Any]:
        """The statistics of a model of this name."""
        counts = dict.fromkeys(_PHASES, self.inferences) | {"fail": self.failures, "cache_hit": 0, "cache_miss": 0}
        return {
            "name": name,
            "version": VERSION,
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": round(self.executions),
            "inference_stats": {
                phase: {"count": counts[phase], "ns": round(1e9 * self.seconds[phase])} for phase in _PHASES
            },
            "batch_stats": [],
            "memory_usage": [],
        }
