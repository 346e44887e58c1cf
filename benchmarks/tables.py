"""Pages of tables: how numbers are written, and on what machine they were found."""

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

from attention_service.runtime.device.torch_device import Device

RESULTS = Path(__file__).parent / "results"
PACKAGES = "torch", "fastapi", "uvicorn"
"""Whose versions bear on most pages."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown; the first ``left`` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def short(value: float) -> str:
    """A number to three digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the largest."""
    return f"{short(median(values))} ({short(min(values))}–{short(max(values))})"


def provenance(packages: Sequence[str] = PACKAGES) -> str:
    """The machine, the versions and the command line of this run."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = [f"{name} {version(name).partition('+')[0]}" for name in packages]
    facts = [f"Python {platform.python_version()}", *versions, f"{usable} cores usable"]
    return f"{Device.open('cpu').model}; {', '.join(facts)}. Command: `{_command()}`."


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec is not None else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])
