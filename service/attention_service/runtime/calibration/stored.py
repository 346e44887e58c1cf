"""Calibrations on disk, beside the modules: one file for each device, version of torch and number of threads.

::

    <root>/calibrations/<key>.json        format, device, torch, threads, when, points, rates, spreads, logs
    <root>/calibrations/<key>.lock        empty: locked by the server that measures (``sharing``)

A write is on the disk before it returns, and replaces the file in one step.
"""

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attention_service.cost import Calibrated, Curves, Rates, Spread
from attention_service.modules.store_files import read_regular, sync
from attention_service.runtime.calibration.plausibility import implausible_growth
from attention_service.runtime.device.torch_device import Device

FORMAT: Final = 4
"""Raised where the same names come to mean other work."""
_BYTES: Final = 2**20
"""The largest calibration that is read."""
MOST_LOG: Final = 30.0
"""Limit of a logarithm: a file with a larger one is damaged."""


@dataclass(frozen=True)
class Stored:
    """A clock and its origin."""

    clock: Calibrated
    at: datetime
    points: int
    """Number of measured requests."""


class _Spread(BaseModel):
    model_config = ConfigDict(extra="forbid")

    low: float = Field(ge=-MOST_LOG, le=0, allow_inf_nan=False)
    high: float = Field(ge=0, le=MOST_LOG, allow_inf_nan=False)
    longest: float = Field(ge=1e-9, le=1e9, allow_inf_nan=False)


class _Rates(BaseModel):
    model_config = ConfigDict(extra="forbid")

    flops_per_s: float = Field(ge=1, le=1e21, allow_inf_nan=False)
    bytes_per_s: float = Field(ge=1, le=1e21, allow_inf_nan=False)
    overhead_s: float = Field(ge=1e-12, le=1e3, allow_inf_nan=False)
    half_flops_per_s: float | None = Field(None, ge=1, le=1e21, allow_inf_nan=False)
    link_bytes_per_s: float | None = Field(None, ge=1, le=1e21, allow_inf_nan=False)


class _File(BaseModel):
    format: int
    device: str
    torch: str
    threads: int
    at: datetime
    points: int
    rates: _Rates
    spreads: dict[str, _Spread]
    logs: dict[str, Annotated[float, Field(ge=-MOST_LOG, le=MOST_LOG, allow_inf_nan=False)]]


def load(root: Path, device: Device) -> Stored | None:
    """Load the calibration of this device; None if there is none, or if it is damaged or implausible."""
    try:
        told = _File.model_validate_json(read_regular(_path(root, device), _BYTES))
    except (OSError, ValidationError):
        return None
    if {"format": told.format, "device": told.device, "torch": told.torch, "threads": told.threads} != _facts(device):
        return None
    curves = Curves(Rates(**told.rates.model_dump()), told.logs)
    spreads = {kind: Spread(**spread.model_dump()) for kind, spread in told.spreads.items()}
    clock = Calibrated(curves, spreads)
    return None if implausible_growth(clock) else Stored(clock, told.at, told.points)


def save(root: Path, device: Device, found: Stored) -> None:
    """Save a calibration of this device. Raises OSError."""
    path, clock = _path(root, device), found.clock
    told = _facts(device) | {
        "at": found.at.isoformat(),
        "points": found.points,
        "rates": asdict(clock.curves.rates),
        "spreads": {kind: asdict(spread) for kind, spread in clock.spreads.items()},
        "logs": {name: round(log, 5) for name, log in clock.curves.logs.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".new-{secrets.token_hex(8)}")
    try:
        staged.write_text(json.dumps(told, indent=1), encoding="utf-8")
        sync(staged)
        os.replace(staged, path)
        sync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def lock_path(root: Path, device: Device) -> Path:
    """Return the file that the measuring server of this device locks; it stays, empty."""
    return _path(root, device).with_suffix(".lock")


def _path(root: Path, device: Device) -> Path:
    told = json.dumps(_facts(device), sort_keys=True).encode()
    return root / "calibrations" / f"{device.torch.type}-{hashlib.sha256(told).hexdigest()[:16]}.json"


def _facts(device: Device) -> dict[str, Any]:
    """Return the facts that a calibration depends on."""
    return {
        "format": FORMAT,
        "device": device.model,
        "torch": str(torch.__version__),
        "threads": device.threads,
    }
