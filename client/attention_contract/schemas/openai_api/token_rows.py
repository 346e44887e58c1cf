"""Generated tokens as rows of a table."""

from collections.abc import Iterable, Sequence
from typing import Any

from attention_contract.arrow_tables import TableRows
from attention_contract.schemas.weights import BY_KEY


def table_of_tokens(choices: Iterable[tuple[int, Iterable[Any] | None]], heads: Sequence[int] | None) -> Any:
    """Return the attention of tokens as a ``pyarrow.Table``: a row for each choice, token, layer and head.

    ``choices``: the index of each choice with its tokens, as ``GeneratedToken``.
    Columns: ``choice``, ``position``, ``token``, ``id``, ``begin_s`` and ``end_s`` of a sound, ``scores.ID`` of a
    probe, ``layer`` (text if the model has several stacks), ``head``; a number for each statistic, as in
    ``classes.names`` for a class; lists ``received``, ``top_keys``, ``top_weights`` and ``weights``. ``heads``: the
    numbers of the heads; default: counted from 0. Needs the extra ``tables``. Raises ImportError.
    """
    rows = TableRows()
    for choice, tokens in choices:
        for token in tokens or ():
            _add_token(rows, choice, token, heads)
    return rows.table()


def _add_token(rows: TableRows, choice: int, token: Any, heads: Sequence[int] | None) -> None:
    columns: dict[str, Any] = {"choice": choice, "position": token.position, "token": token.token, "id": token.id}
    columns |= dict(zip(("begin_s", "end_s"), token.seconds or (), strict=False))
    columns |= {f"scores.{name}": score for name, score in (token.scores or {}).items()}
    if not token.layers:
        rows.add(1, columns)
    for layer in token.layers:
        lists = {"weights": layer.weights}
        if layer.top_keys is not None:
            lists |= {"top_keys": layer.top_keys.keys, "top_weights": layer.top_keys.weights}
        rows.add_heads(columns | {"layer": layer.layer}, {"": layer.statistics}, BY_KEY, heads, lists)
