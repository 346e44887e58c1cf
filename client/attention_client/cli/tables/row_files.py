"""Files of rows: the numbers of heads as Parquet or Arrow."""

from pathlib import Path
from typing import Any, Final, Protocol

import typer

from attention_client.cli.arguments.tensor_arguments import ending_in
from attention_contract.arrow_tables import write_table

ROW_SUFFIXES: Final = (".parquet", ".arrow")
rows_writable = ending_in(*ROW_SUFFIXES)
"""The callback of an option that names a file of rows."""


class HasRows(Protocol):
    """A reply or a survey that has rows."""

    def to_table(self) -> Any:
        """Return a ``pyarrow.Table``."""


def write_rows(path: Path, rows: HasRows) -> None:
    """Write a file of rows, and say how many."""
    try:
        table = rows.to_table()
    except ImportError as fault:
        raise typer.BadParameter(str(fault), param_hint="--output") from None
    path.write_bytes(write_table(table, "parquet" if path.suffix.lower() == ".parquet" else "arrow"))
    typer.echo(f"{path}: {table.num_rows} rows", err=True)
