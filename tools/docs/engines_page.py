"""Generator of the table of engines in ``docs/vllm.md``: ``python -m tools.docs.engines_page`` writes it.

An engine is one of ``ENGINES``; what it answers is asked of the code that answers, or that refuses.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final, get_args

from attention_contract import operations
from attention_contract.errors import InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.attention import EditableTap
from attention_contract.schemas.model_requests import ModelTap
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.schemas.weights import StatisticName
from attention_service.core.inspection.statistics import OF_SOME, PAIR_STATISTICS
from tools.docs.page_parts import with_part
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "vllm.md"
_VECTOR: Final = "0" * 32
FIELDS: Final[Mapping[str, Any]] = {
    "heads": [0], "layers": [0], "top_k": 1, "weights": True, "keep": True, "watch": [{"probe": _VECTOR}],
    "steer": [{"vector": _VECTOR}], "edits": {"0": [{"tap": "context", "set": 0}]},
}  # fmt: skip
"""Fields of ``attention``, each with a value."""
_OPTIONS: Final = {"token_classes": {"a": [1]}}
_QUESTIONS: Final = (
    "create_completion", "create_chat_completion", "create_response", "model_forward", "model_weights",
    "model_gradients", "model_effects", "model_lens", "model_context", "model_similarity", "model_complexity",
    "fit_probe", "fit_vector", "create_recording",
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """What one way to run a model answers."""

    name: str
    asks: Callable[[Operation], bool]
    """True for a question that it answers."""
    reads: Iterable[str]
    """The taps of layers that it returns."""
    edits: Iterable[str]
    """The taps that it edits, while tokens are generated too."""
    field: Callable[[Mapping[str, Any]], bool]
    """True for an ``attention`` of generated tokens that it answers."""


def _of_service(wanted: Mapping[str, Any]) -> bool:
    """True if the service tells it of generated tokens: all but what needs the queries of a whole text."""
    needs_text = PAIR_STATISTICS | {name for name, each in OF_SOME.items() if "request for weights" in each.needs}
    return not needs_text.intersection(wanted.get("statistics", ()))


def _vllm() -> Engine:
    sys.path.append(str(ROOT / "plugins" / "vllm"))
    asks, door = import_module("attention_vllm.asks"), import_module("attention_vllm.door.attention_door")

    def answered(wanted: Mapping[str, Any]) -> bool:
        try:
            asks.check_answered(AttentionOfTokens.model_validate(wanted))
        except InvalidRequest:
            return False
        return True

    def routed(operation: Operation) -> bool:
        path = operation.path.format(model="m")
        return any(pattern.fullmatch(path) for pattern, _ in door.ROUTES)

    return Engine("vLLM", routed, asks.TAPS, asks.EDITED_TAPS, answered)


def engines() -> list[Engine]:
    """Return the engines, one a column."""
    service = Engine(
        "this service", lambda _: True, tuple(_taps(get_args(ModelTap))), get_args(EditableTap), _of_service
    )
    # tests/tools/test_two_devices.py holds that it answers the same.
    return [service, replace(service, name="on several devices"), _vllm()]


def _rows(engine: Engine) -> dict[str, str]:
    """The answer of an engine to each thing that can be asked."""
    found = {}
    for name in _QUESTIONS:
        operation: Operation = getattr(operations, name)
        found[f"`{operation.method} {operation.path}`"] = "yes" if engine.asks(operation) else ""
    reads, edits = set(engine.reads), set(engine.edits)
    for tap in dict.fromkeys((*_taps(get_args(ModelTap)), *get_args(EditableTap))):
        words = [word for word, taps in (("returned", reads), ("edited", edits)) if tap in taps]
        found[f"tap `{tap}`"] = ", ".join(words)
    for name, value in FIELDS.items():
        found[f"`attention.{name}`"] = "yes" if engine.field({name: value}) else ""
    for name in get_args(StatisticName):
        wanted = {"statistics": [name], "statistic_options": _OPTIONS if name == "classes" else {}}
        found[f"statistic `{name}` of a token"] = "yes" if engine.field(wanted) else ""
    return found


def _taps(given: Iterable[Any]) -> Iterable[str]:
    """The names of a union of literals."""
    for each in given:
        yield from [each] if isinstance(each, str) else _taps(get_args(each))


def table() -> str:
    """Return the table of all engines; what none answers is left out."""
    columns = {engine.name: _rows(engine) for engine in engines()}
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for row in next(iter(columns.values())):
        cells = [column[row] for column in columns.values()]
        if any(cells):
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """Return the page with the present table."""
    return with_part(PAGE, "engines", "tools.docs.engines_page", f"\n{table()}")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
