"""Parts of documents that programs write, each between two marks that no reader sees."""

from pathlib import Path


def with_part(page: Path, name: str, module: str, part: str) -> str:
    """Return the text of a page with a present part: ``name`` of its marks, and the module that writes it."""
    begin, end = f"<!-- {name}: python -m {module} -->\n", f"<!-- end of {name} -->\n"
    head, _, rest = page.read_text("utf-8").partition(begin)
    return f"{head}{begin}{part}\n{end}{rest.partition(end)[2]}"
