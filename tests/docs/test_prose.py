"""Docstrings begin with an imperative or a noun phrase, and the names of source files are unique."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.docs.snippets import ROOT

FOLDERS = ("client", "service", "plugins", "examples", "benchmarks", "training")
FORBIDDEN = frozenset(["What", "Whether", "How", "As", "Where", "Of", "By", "That", "Those", "Who", "Which", "So"])
"""Words that begin a question or a clause without a subject."""
BEGUN = re.compile(rf"""["']\\?\s*({"|".join(sorted(FORBIDDEN))})\b""")
"""A string that begins so: a file without one is not parsed, which takes ten times as long."""
SHARED = {
    "__init__.py": "marks a package",
    "__main__.py": "makes a package a program",
    "base.py": "declares the protocol and the registry of the entries in its folder",
    "circuits.py": "schemas and computation",
    "errors.py": "the client's errors extend the contract's",
    "attention.py": "schemas and computation of attention",
    "gradients.py": "schemas and operation",
    "effects.py": "schemas and operation",
    "rollout.py": "schemas and computation",
    "hopfield.py": "schemas, operation, computation and commands of retrieval",
    "similarity.py": "schemas and computation",
    "weights.py": "schemas and operation",
    "attribution.py": "schemas, computation and operation",
    "tensors.py": "tensors on the wire, and as PyTorch has them",
}
"""File names that several folders share, with the reason."""


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def faults(text: str) -> list[int]:
    """Return the lines of docstrings that begin with a forbidden word."""
    if BEGUN.search(text) is None:
        return []
    return [
        line for line, words in docstrings(text) if words.split()[:1] and words.split()[0].strip(",:;") in FORBIDDEN
    ]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_docstring_begins_with_a_question_or_a_clause():
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in sources(*FOLDERS) for line in faults(path.read_text("utf-8"))
    ]
    assert not found, f"{len(found)} docstrings begin with one of {sorted(FORBIDDEN)}:\n" + "\n".join(found)


def test_file_names_are_unique():
    count = Counter(path.name for path in sources("client", "service"))
    assert {name for name, files in count.items() if files > 1} == set(SHARED)


def test_the_rule_covers_modules_classes_functions_and_attributes():
    text = """
'What it is.'
class Head:
    'Whose keys it reads.'
    width: int
    'Of the head.'
    def rows(self):
        'Return the rows.'
"""
    assert faults(text) == [2, 6]
