"""The layout of the packages: no two files import each other, by any way round, and no folder is crowded."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT / top).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("client", "service", "plugins/vllm")
    for path in (ROOT / top).rglob("*.py")
    if "tests" not in path.relative_to(ROOT / top).parts
}
"""The path of each module of the product by its dotted name."""
PACKAGES = sorted({name.partition(".")[0] for name in FILES})
MOST_FILES = 20
OPTIONS = {"attention_contract.spec", "attention_contract.positions"}
"""The modules that declare the options of entries, by the names that the wire has for them."""
ENTRIES = tuple(
    f"attention_service.core.{kind}." for kind in ("scores", "masks", "positions", "normalizers", "methods")
)
"""The packages whose classes compute these entries, and have their names."""
SHARED_NAMES = {"SessionCache"}
"""The wire has this name for a tensor file, and transformers calls every such object a cache."""


@dataclass
class Source:
    """What the tests look at in a file. The whole tree of all files would take a gigabyte."""

    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    """Within functions and for type checkers too."""
    classes: list[str] = field(default_factory=list)
    """The names of those of the module itself."""
    bases: dict[str, set[str]] = field(default_factory=dict)
    """The names of the bases of every class."""
    texts: set[str] = field(default_factory=set)
    asks: list[tuple[int, set[str]]] = field(default_factory=list)
    """The lines of ``isinstance`` and ``issubclass``, and the names in each."""
    attributes: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    """Attributes that are set or deleted."""


@cache
def source(path: Path) -> Source:
    """Return what a file has, which is parsed once: all files take seconds."""
    found, tree = Source(), ast.parse(path.read_text("utf-8"))
    found.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            found.bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.texts.add(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in {"isinstance", "issubclass"}:
            found.asks.append((node.lineno, {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}))
        elif isinstance(node, ast.Attribute):
            (found.attributes if isinstance(node.ctx, ast.Load) else found.written).add(node.attr)
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of the product that a file imports, within functions and for type checkers too."""
    for node in source(path).imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
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


def reader_classes() -> set[str]:
    """Return the names of the classes that read the inputs of whole models."""
    bases: dict[str, set[str]] = {}
    for name, path in FILES.items():
        if name.startswith("attention_service.models.inputs"):
            bases |= source(path).bases
    found = {"InputReader"}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found


def test_a_reader_says_what_it_can_and_nothing_asks_for_its_class():
    readers = reader_classes()
    assert {"PairInputs", "DetectorInputs", "SoundPrompts"} <= readers
    asked = [f"{name}:{line}" for name, path in FILES.items() for line, names in source(path).asks if readers & names]
    assert asked == []


def is_entry(modules: list[str]) -> bool:
    """Return True for the options of an entry and the class that computes it."""
    return sum(name in OPTIONS for name in modules) == sum(name.startswith(ENTRIES) for name in modules) == 1


def test_each_public_class_has_a_word_of_its_own():
    modules = defaultdict(list)
    for name, path in FILES.items():
        for word in source(path).classes:
            if not word.startswith("_"):
                modules[word].append(name)
    shared = {word: own for word, own in modules.items() if len(own) > 1 and not (len(own) == 2 and is_entry(own))}
    assert shared.keys() == SHARED_NAMES, shared


def test_no_module_is_imported_under_one_letter():
    short = [
        f"{name}: {alias.name} as {alias.asname}"
        for name, path in FILES.items()
        for node in source(path).imports
        for alias in node.names
        if alias.asname is not None and len(alias.asname) == 1
    ]
    assert short == []


def test_a_model_is_watched_and_changed_from_one_file():
    rooms = "attention_service.models."
    sources = {name: source(path) for name, path in FILES.items() if name.startswith(rooms)}
    registers = re.compile(r"register_\w*(forward|backward)\w*")
    hooking = {name for name, own in sources.items() if any(map(registers.fullmatch, own.attributes | own.written))}
    patching = {name for name, own in sources.items() if "forward" in own.written}
    assert hooking == {f"{rooms}passes.module_hooks"}
    assert {name for name in patching if not name.startswith(f"{rooms}passes.")} == set()


@pytest.mark.parametrize("name", ["sink_mass", "alignment"])
def test_a_statistic_is_named_in_the_contract_and_at_its_formula_alone(name):
    files = {at: path for at, path in FILES.items() if at.startswith(("attention_contract", "attention_service"))}
    naming = {module for module, path in files.items() if name in source(path).texts}
    assert naming <= {"attention_contract.schemas.weights", "attention_service.core.inspection.statistics"}


def test_no_folder_has_more_files_than_one_sees_at_a_glance():
    counts = Counter(path.parent.relative_to(ROOT) for path in FILES.values() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize("room", sorted((ROOT / "service").rglob("__init__.py")), ids=lambda file: file.parent.name)
def test_each_room_of_the_server_says_what_it_imports_and_which_file_to_read_first(room):
    says = " ".join((ast.get_docstring(ast.parse(room.read_text("utf-8"))) or "").split())
    assert "import" in says
    (first,) = re.findall(r"Read ``([\w/]+\.py)`` first\.", says)
    assert (room.parent / first).is_file(), first


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_tells_type_checkers_that_it_has_types(package):
    assert (FILES[package].parent / "py.typed").exists()
