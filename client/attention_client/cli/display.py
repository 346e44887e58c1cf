"""Replies as tables for people."""

import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attention_contract.base import WireModel
from attention_contract.schemas.modules import ModuleList, ParameterList
from attention_contract.schemas.server import VariantList
from attention_contract.tensors import dtype_name


def print_out(what: Any) -> None:
    """Print to standard output: as wide as the terminal, or 240 columns into a file."""
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False).print(what)


def new_table(*columns: str, left: int = 1) -> Table:
    """Make a table whose first columns are text and the others numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < left else "right")
    return table


def scaled(value: float, unit: str = "") -> str:
    """Format a count with a decimal prefix, as in ``1.07 GFLOP``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


def number(value: Any) -> str:
    """Format a number to four digits."""
    return f"{float(value):.4g}"


def tensors(found: dict[str, NDArray[Any]]) -> None:
    """Print shape, dtype and statistics of each tensor."""
    table = new_table("tensor", "shape", "dtype", "mean", "std", "min", "max", left=3)
    for name, array in found.items():
        finite = array.astype(np.float64)
        finite = finite[np.isfinite(finite)]
        statistics = [finite.mean(), finite.std(), finite.min(), finite.max()] if finite.size else []
        table.add_row(name, str(list(array.shape)), dtype_name(array), *map(number, statistics))
    print_out(table)


def values(array: NDArray[Any]) -> None:
    """Print the numbers themselves, abridged if there are many."""
    print_out(Text(f"{list(array.shape)} {dtype_name(array)}", style="dim"))
    print_out(Text(np.array2string(array.astype(np.float64), precision=4, threshold=200)))


def facts(reply: WireModel) -> None:
    """Print every field that is set, nested ones by their dotted name."""
    table = new_table("field", "value", left=2)
    for name, value in _flat(reply.model_dump(by_alias=True, exclude_none=True)):
        table.add_row(name, Text(_value(value)))
    print_out(table)


def _value(value: Any) -> str:
    """Format words as they are, everything else as JSON, which options take."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _flat(value: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    rows = []
    for name, item in value.items():
        if isinstance(item, dict):
            rows += _flat(item, f"{path}{name}.")
        else:
            rows.append((f"{path}{name}", item))
    return rows


def modules(reply: ModuleList) -> None:
    """Print one row for each module."""
    table = new_table(
        "module", "version", "device", "dtype", "d_model", "heads", "kv heads", "parameters", "bytes", left=4
    )
    for module in reply.modules:
        config = module.config
        sizes = (config.d_model, config.num_heads, config.num_kv_heads or config.num_heads)
        counts = (scaled(module.parameter_count), scaled(module.bytes, "B"))
        dtype = config.dtype or ""
        table.add_row(module.name, module.version[:12], module.device, dtype, *map(str, sizes), *counts)
    print_out(table)


def parameters(reply: ParameterList) -> None:
    """Print one row for each parameter; a column counts numbers that are not finite, if there are any."""
    broken = ["not finite"] if any(one.non_finite for one in reply.parameters) else []
    table = new_table("parameter", "shape", "dtype", "mean", "std", "min", "max", "norm", *broken, left=3)
    for one in reply.parameters:
        statistics = map(number, (one.mean, one.std, one.min, one.max, one.norm))
        table.add_row(one.name, str(one.shape), one.dtype, *statistics, *(str(one.non_finite) for _ in broken))
    print_out(table)


def variants(reply: VariantList) -> None:
    """Print one row for each variant."""
    table = new_table("kind", "name", "summary", "cost", left=4)
    for variant in reply.variants:
        table.add_row(variant.kind, variant.name, Text(variant.summary), Text(variant.cost))
    print_out(table)
