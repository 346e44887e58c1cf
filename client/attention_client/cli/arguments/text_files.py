"""Files with one text a line."""

import sys
from pathlib import Path

import typer

from attention_client.survey.head_survey import texts_of


def texts_of_file(file: str) -> list[str]:
    """Read the texts of a file, or of standard input for ``-``. Raises BadParameter for a file without any."""
    if file != "-" and not Path(file).is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="FILE")
    try:
        texts = texts_of(sys.stdin.read() if file == "-" else Path(file).read_text("utf-8"))
    except UnicodeDecodeError as fault:
        raise typer.BadParameter(f"{file} is not UTF-8 text: {fault.reason}", param_hint="FILE") from None
    if not texts:
        raise typer.BadParameter(f"{file} has no text; expected one a line", param_hint="FILE")
    return texts
