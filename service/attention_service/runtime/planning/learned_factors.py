"""Predicted times corrected by what ran: for each kernel, computation and dtype a factor of its last runs.

The factors are kept beside the modules, one file for each device, version of torch and number of threads::

    <root>/times/<key>.json        format, device, torch, threads, factors

A write is on the disk before it returns, and replaces the file in one step.
"""

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attention_service.cost import Clock, Factor, LearnedClock, kind_of
from attention_service.modules.store_files import locked, read_regular, replace_file
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from attention_service.runtime.planning.run_ratios import RunRatios

log = logging.getLogger(__name__)

FORMAT: Final = 2
"""Raised if the same kinds come to mean other work, or factors have other fields."""
SHORTEST_S: Final = 2e-4
"""Predicted seconds below which a run says more of the interpreter than of the device."""
SPACING_S: Final = 0.1
"""Seconds between two runs of a kind that count: runs of one moment share their disturbances."""
_WORKED: Final = 0.8
"""Share of its time for which the thread of a run had a processor. Below it other load explains the time."""
_CHANGED: Final = 0.15
"""Change of a logarithm, of a factor or of its bounds, for which plans are made anew."""
_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 600.0
"""Seconds until the clock may change again; each pause is twice the last, since a change forgets all plans."""
_MAX_FILE_BYTES: Final = 2**20
"""The largest file that is read."""
_MOST_LOG: Final = 30.0
_MOST_KINDS: Final = 4096


@dataclass
class _Runs:
    """The last runs of one kind."""

    ratios: RunRatios = field(default_factory=RunRatios)
    at: float = -math.inf
    """The end of the last run that counted."""


class LearnedFactors:
    """Learns from runs on one device. Used from the event loop only; times are seconds of a monotonic clock."""

    def __init__(self, base: Clock) -> None:
        """``base``: the clock whose predictions are corrected."""
        self.changes = 0
        """Changes of the clock since the start."""
        self.changed_at: datetime | None = None
        """The time of the last change, or of the one that was loaded."""
        self._base = base
        self._runs: dict[str, _Runs] = {}
        self._factors: dict[str, Factor] = {}
        self._next, self._pause = -math.inf, _PAUSE_S
        self._has_news = False
        """True if a run counted since the factors were last computed, which takes tens of microseconds a kind."""

    def see(self, run: TimedRun, dtype: str, at: float) -> None:
        """Note a run that ended at this time. Its prediction was made with the present factors."""
        worked = run.seconds if run.processor is None else run.processor
        if run.predicted.median < SHORTEST_S or worked < _WORKED * run.seconds:
            return
        kind = kind_of(run.purpose, run.kernel, dtype)
        if (runs := self._runs.get(kind)) is None:
            runs = self._runs[kind] = _Runs()
        if at - runs.at < SPACING_S:
            return
        predicted, factor = run.predicted.median, self._factors.get(kind)
        if factor is not None:
            predicted = factor.undone(predicted)
        runs.ratios.note(predicted, run.seconds)
        runs.at = at
        self._has_news = True

    def changed(self, now: float) -> LearnedClock | None:
        """Return a clock with the factors of the runs seen so far, if they changed and the last change is past."""
        if now < self._next or not self._has_news:
            return None
        self._has_news = False
        factors = {kind: factor for kind, runs in self._runs.items() if (factor := runs.ratios.factor()) is not None}
        if not any(_differs(factor, self._factors.get(kind)) for kind, factor in factors.items()):
            return None
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        self.changes += 1
        self.changed_at = datetime.now(UTC)
        return self._clock(factors)

    def load(self, root: Path, device: Device) -> LearnedClock | None:
        """Return the clock with the factors that are kept for this device; None if there are none that can be read."""
        try:
            stored = _File.model_validate_json(read_regular(_path(root, device), _MAX_FILE_BYTES))
        except (OSError, ValidationError):
            return None
        if stored.model_dump(include={"format", "device", "torch", "threads"}) != _facts(device):
            return None
        self.changed_at = stored.at
        return self._clock({kind: Factor(**factor.model_dump()) for kind, factor in stored.factors.items()})

    def save(self, root: Path, device: Device) -> None:
        """Keep the factors for this device. A folder that cannot be written to is logged."""
        path = _path(root, device)
        stored = _facts(device) | {
            "at": (self.changed_at or datetime.now(UTC)).isoformat(),
            "factors": {kind: asdict(factor) for kind, factor in self._factors.items()},
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent):
                replace_file(path, [json.dumps(stored, indent=1).encode()])
        except OSError as fault:
            log.warning("learned times could not be kept: %s: %s", fault.strerror, path)

    def _clock(self, factors: dict[str, Factor]) -> LearnedClock:
        self._factors = self._factors | factors
        return LearnedClock(self._base, self._factors)


def _differs(factor: Factor, former: Factor | None) -> bool:
    if former is None:
        return True
    pairs = [(factor.low, former.low), (factor.high, former.high)]
    pairs += [(factor.middle(at), former.middle(at)) for at in map(math.exp, (factor.shortest, factor.longest))]
    return any(abs(one - other) > _CHANGED for one, other in pairs)


_Log = Annotated[float, Field(ge=-_MOST_LOG, le=_MOST_LOG, allow_inf_nan=False)]


class _Factor(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shortest: _Log
    longest: _Log
    short: _Log
    long: _Log
    low: float = Field(ge=-_MOST_LOG, le=0, allow_inf_nan=False)
    high: float = Field(ge=0, le=_MOST_LOG, allow_inf_nan=False)


class _File(BaseModel):
    format: int
    device: str
    torch: str
    threads: int
    at: datetime
    factors: dict[str, _Factor] = Field(max_length=_MOST_KINDS)


def _path(root: Path, device: Device) -> Path:
    facts = json.dumps(_facts(device), sort_keys=True).encode()
    return root / "times" / f"{device.torch.type}-{hashlib.sha256(facts).hexdigest()[:16]}.json"


def _facts(device: Device) -> dict[str, Any]:
    """Return the facts that the factors depend on."""
    return {
        "format": FORMAT,
        "device": device.model,
        "torch": str(torch.__version__),
        "threads": device.threads,
    }
