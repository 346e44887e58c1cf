"""Numbers of heads as tables of Apache Arrow, which pandas and Polars read. Needs pyarrow: the extra ``tables``.

A row is one head, of one text or of one generated token. A column is a number for each head, or a list of them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

TableForm = Literal["parquet", "arrow", "stream"]
"""Parquet, and Arrow's forms of a file and of a stream."""
NEEDS_PYARROW: Final = "a table needs pyarrow: pip install 'attention-service[tables]'"


class TableRows:
    """Rows that are collected block by block. A block has one row for each of so many heads."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._blocks: list[dict[str, Any]] = []

    def add(self, count: int, columns: dict[str, Any]) -> None:
        """Add ``count`` rows. A column is one value for all of them, numbers ``[count]``, or lists ``[count, n]``."""
        self._counts.append(count)
        self._blocks.append(columns)

    def add_heads(
        self,
        columns: Mapping[str, Any],
        statistics: Mapping[str, BaseModel | None],
        lists: Collection[str],
        heads: Sequence[int] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a row for each head of one layer, or for each text and head; ``columns`` come first.

        ``statistics``: ``[H]`` or ``[B, H]`` by what their names begin with; those of ``lists`` have a dimension more.
        ``heads``: the numbers of the heads. ``more``: ``[H, n]`` or None.
        """
        numbers = {
            name: array
            for before, given in statistics.items()
            if given is not None
            for name, array in _statistic_columns(given, lists, before)
        }
        numbers |= {name: np.asarray(array)[None] for name, array in (more or {}).items() if array is not None}
        if not numbers:
            return
        texts, count = next(iter(numbers.values())).shape[:2]
        places = dict(columns)
        if "text" in places:
            places["text"] = np.repeat(np.arange(texts, dtype=np.int32), count)
        places["head"] = np.tile(np.asarray(range(count) if heads is None else heads, np.int32), texts)
        rows = {name: array.reshape(texts * count, *array.shape[2:]) for name, array in numbers.items()}
        self.add(texts * count, places | rows)

    def table(self) -> Any:
        """Return a ``pyarrow.Table`` of all rows; what a block does not have is null. Raises ImportError."""
        try:
            import pyarrow as arrow  # noqa: PLC0415 - an extra
        except ImportError as fault:
            raise ImportError(NEEDS_PYARROW, name="pyarrow") from fault
        names = dict.fromkeys(name for block in self._blocks for name in block)
        return arrow.table({name: self._column(arrow, [block.get(name) for block in self._blocks]) for name in names})

    def _column(self, arrow: Any, parts: list[Any]) -> Any:
        """The column of the parts of all blocks."""
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if not arrays:
            kinds = {type(part) for part in parts if part is not None}
            named = kinds == {int, str}  # layers of several stacks
            values = [str(part) if named and part is not None else part for part in parts]
            return arrow.array([value for value, count in zip(values, self._counts, strict=True) for _ in range(count)])
        columns = [
            _plain(part) if isinstance(part, np.ndarray) else arrow.nulls(count)
            for part, count in zip(parts, self._counts, strict=True)
        ]
        made = [_lists(arrow, column) if getattr(column, "ndim", 1) == 2 else arrow.array(column) for column in columns]
        kind = next(array.type for array, part in zip(made, parts, strict=True) if isinstance(part, np.ndarray))
        return arrow.chunked_array([array.cast(kind) for array in made], kind).combine_chunks()


def _plain(numbers: NDArray[Any]) -> NDArray[Any]:
    """Numbers in a dtype that every reader of tables has."""
    narrow = numbers.dtype.kind not in "fiubU" or numbers.dtype == np.float16  # bfloat16 is a kind of its own
    return np.ascontiguousarray(numbers, np.float32 if narrow else None)


def _lists(arrow: Any, numbers: NDArray[Any]) -> Any:
    """A list for each row of ``[rows, n]``."""
    rows, width = numbers.shape
    return arrow.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * width, numbers.ravel())


def _statistic_columns(
    statistics: BaseModel, lists: Collection[str], before: str = ""
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each statistic that came with a dotted name, and its numbers ``[B, H]``; ``[B, H, n]`` of ``lists``."""
    for name in type(statistics).model_fields:
        value = getattr(statistics, name)
        if value is None:
            continue
        for part, numbers in value.items() if isinstance(value, dict) else [("", value)]:
            array = np.asarray(numbers)
            array = array[None] if array.ndim == 1 + (name in lists) else array
            yield f"{before}{name}.{part}" if part else f"{before}{name}", array


def write_table(table: Any, form: TableForm) -> bytes:
    """Return a ``pyarrow.Table`` as the bytes of a file or a stream."""
    import pyarrow as arrow  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    if form == "parquet":
        file = BytesIO()
        parquet.write_table(table, file)
        return file.getvalue()
    sink = arrow.BufferOutputStream()
    make = arrow.ipc.new_file if form == "arrow" else arrow.ipc.new_stream
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
