"""The layout of the packages: no two files import each other, by any way round, and no folder is crowded."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT / top).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("client", "service")
    for path in (ROOT / top).rglob("*.py")
}
"""The path of each module of the product by its dotted name."""
PACKAGES = sorted({name.partition(".")[0] for name in FILES})
MOST_FILES = 20


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of the product that a file imports, within functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in FILES else node.module for name in within)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other(package):
    own = {name: path for name, path in FILES.items() if name.partition(".")[0] == package}
    graph = {name: {each for each in imported(path) if each in own} for name, path in own.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        pytest.fail(f"import each other: {' <- '.join(fault.args[1])}")


def test_no_folder_has_more_files_than_one_sees_at_a_glance():
    counts = Counter(path.parent.relative_to(ROOT) for path in FILES.values() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}
