"""The packages that test files import, and those that an extra of ``pyproject.toml`` installs.

``python -m tools.extras`` lists the files of tests that ask for a library that the extra ``dev`` adds to ``test``.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OWN = {
    path.name
    for top in (ROOT, ROOT / "client", ROOT / "service", ROOT / "plugins" / "vllm")
    for path in top.iterdir()
    if path.is_dir()
}
"""The packages of the repository."""
FILES = sorted(path for pattern in ("test_*.py", "conftest.py") for path in (ROOT / "tests").rglob(pattern))
"""The files that pytest imports by itself."""


def installed_by(extra: str) -> set[str]:
    """The modules of top level that this project with an extra installs, with all that their distributions need."""
    distributions: set[tuple[str, str]] = set()
    waiting = [Requirement(f"attention-service[{extra}]")]
    while waiting:
        requirement = waiting.pop()
        for chosen in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, chosen) not in distributions:
                distributions.add((name, chosen))
                waiting += _required(name, chosen)
    names = {name for name, _ in distributions}
    return {module for module, owners in packages_distributions().items() if names & {*map(canonicalize_name, owners)}}


def _required(name: str, extra: str) -> Iterator[Requirement]:
    """Yield the requirements that a distribution has with an extra, and not without it."""
    if name == "attention-service":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        found = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:
        try:
            found = requires(name) or []
        except PackageNotFoundError:
            return
    for requirement in map(Requirement, found):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def imported(path: Path) -> set[str]:
    """The modules that a file imports when it is imported itself, also by way of other files of the repository.

    Modules below a call of ``pytest.importorskip`` that names them are left out.
    """
    needed, known, seen = set[str](), set[str](), {path}

    def walk(file: Path) -> None:
        for name, skips in _imports(file):
            top = name.partition(".")[0]
            if skips and top not in OWN:
                # Another test file that is skipped stays imported in part, and what imports from it fails.
                fails = file != path and file.name.startswith("test_") and top not in known
                (needed if fails else known).add(top)
            elif skips:
                continue
            elif top in OWN:
                for below in set(_files(name)) - seen:
                    seen.add(below)
                    walk(below)
            elif top not in known and top not in sys.stdlib_module_names:
                needed.add(top)

    walk(path)
    return needed


@cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    return list(_at_import(ast.parse(path.read_text("utf-8")).body))


def _at_import(body: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """Yield the modules that statements import as they run, in their order, and whether a test is skipped without."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.Import):
            yield from ((alias.name, False) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield from ((f"{statement.module}.{alias.name}", False) for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _at_import(statement.orelse)
        elif blocks := [
            getattr(statement, name) for name in ("body", "orelse", "finalbody") if hasattr(statement, name)
        ]:
            for block in blocks:
                yield from _at_import(block)
        else:
            yield from ((name, True) for name in _asked(statement))


def _asked(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement with ``importorskip`` names."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if "importorskip" in ast.unparse(tree):
        yield from (text for text in texts if text.replace(".", "").isidentifier())


def _files(name: str) -> Iterator[Path]:
    """Yield the files under tests, benchmarks and the like that the import of a dotted name runs."""
    folder = ROOT
    for part in name.split("."):
        if (file := folder / f"{part}.py").exists():
            yield file
            return
        folder /= part
        if (file := folder / "__init__.py").exists():
            yield file


def _text_names(path: Path) -> frozenset[str]:
    """The first parts of all texts of a file that could name a module."""
    return frozenset(
        node.value.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def asking_for_more() -> list[Path]:
    """The test files with a text that names a module that ``dev`` installs and ``test`` does not."""
    more = installed_by("dev") - installed_by("test")
    return [path for path in FILES if path.name != "conftest.py" and _text_names(path) & more]


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in asking_for_more()))
