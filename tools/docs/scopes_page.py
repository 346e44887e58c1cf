"""Generator of the table of operations in ``docs/security.md``: ``python -m tools.docs.scopes_page`` writes it."""

from itertools import groupby

from attention_service.api.access.scopes import SCOPES
from tools.docs.page_parts import with_part
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "security.md"


def table() -> str:
    """Return the table of the operations, and other routes, that each set of scopes lets in."""
    rows = sorted((len(scopes), sorted(scopes), name) for name, scopes in SCOPES.items())
    lines = []
    for scopes, routes in groupby(rows, key=lambda row: row[1]):
        named = " or ".join(f"`{scope}`" for scope in scopes) or "no key"
        lines.append(f"| {named} | {', '.join(f'`{name}`' for _, _, name in routes)} |\n")
    return "| scope | operations |\n|---|---|\n" + "".join(lines)


def render() -> str:
    """Return the page with the present table."""
    return with_part(PAGE, "scopes", "tools.docs.scopes_page", f"\n{table()}")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
