"""Generator of ``docs/variants.md``: ``python -m tools.docs.variants_page`` writes the page from the registries.

The measured growth comes from ``benchmarks/results/growth.md``, which ``python -m benchmarks.growth`` writes.
"""

from typing import Any

from attention_service.core.registry import Entry, variants
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "variants.md"
GROWTH = ROOT / "benchmarks" / "results" / "growth.md"
TITLES = {
    "score": "Scores",
    "normalizer": "Normalizers",
    "position": "Positions",
    "mask": "Masks",
    "method": "Methods",
    "kernel": "Kernels",
}
BAR = r"\|"
"""An escaped bar inside a table cell."""
HEAD = """# Variants of a spec

These tables list the entries of `GET /v1/variants`.

- i counts queries and j keys. p is a position: the index plus the offset. ∂x stands for ∂L/∂x.
- n is the length, d the head width, h the number of heads. [The cost model](cost-model.md#letters-of-orders) explains
  the other letters.
- Gradients are exact. Tests compare each with `gradcheck` in float64.
- "measured" gives the exponents of n for processor time and for peak memory without the inputs, from n = 1k to at most
  64k on a CPU. [growth.md](../benchmarks/results/growth.md) has the measurements and their masks.

<!-- python -m tools.docs.variants_page writes this page from the registries. -->
"""


def render() -> str:
    """Return the page."""
    measured = growth()
    return HEAD + "".join(_section(kind, title, measured) for kind, title in TITLES.items())


def growth() -> dict[str, str]:
    """Return the exponents of time and memory, as in ``1.02 · 0.99``, by the row's name in the growth table."""
    rows = [line.strip("| \n").split("|") for line in GROWTH.read_text("utf-8").splitlines() if line.startswith("| ")]
    header = [cell.strip() for cell in rows[0]]
    time, memory = (header.index(f"{name} ∝ n^") for name in ("time", "memory"))
    return {row[0].strip(): f"{row[time].strip()} · {row[memory].strip()}" for row in rows[1:]}


def _section(kind: str, title: str, measured: dict[str, str]) -> str:
    rows = [_cells(entry, measured) for entry in variants() if entry.kind == kind]
    common = {name: cell for name, cell in rows[0].items() if len(rows) > 1 and {row[name] for row in rows} == {cell}}
    said = "".join(f"The {name} of each: {cell}.\n\n" for name, cell in common.items() if cell)
    columns = [name for name in rows[0] if name not in common]
    table = "".join(f"| {' | '.join(row[name].replace('|', BAR) for name in columns)} |\n" for row in rows)
    return f"\n## {title}\n\n{said}| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n{table}"


def _cells(entry: Entry[Any], measured: dict[str, str]) -> dict[str, str]:
    """Return the cells of an entry by their columns."""
    return {
        "name": f"`{entry.name}`",
        "formula": entry.formula,
        "options": _options(entry),
        "gradient": entry.gradient,
        "cost": entry.cost,
        "measured: time · memory": measured.get(f"{entry.kind} {entry.name}", ""),
        "source": entry.source,
    }


def _options(entry: Entry[Any]) -> str:
    fields = {} if entry.options is None else entry.options.model_fields
    listed = [f"`{name}`{_default(field)}" for name, field in fields.items() if name != "name"]
    return ", ".join(listed)


def _default(field: Any) -> str:
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    return f" = {'null' if default is None else str(default).lower() if isinstance(default, bool) else default}"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
