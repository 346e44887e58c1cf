"""The docstrings of a model's fields, read from its source when somebody asks for them.

pydantic's ``use_attribute_docstrings`` reads them whenever a class is made, which took half of the time of a command
that sends one request.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def described(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a model; one without a description gets the docstring under its last declaration."""
    _describe(model)
    return model.model_fields


@cache
def _describe(model: type[BaseModel]) -> None:
    fields = dict(model.model_fields)
    for kind in model.__mro__:
        docstrings = _docstrings(kind.__module__).get(kind.__qualname__, {})
        for name in fields.keys() & inspect.get_annotations(kind).keys():
            field = fields.pop(name)
            field.description = field.description or docstrings.get(name)


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of a module's attributes, by class and attribute; none if it has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {name: _of_attributes(node.body) for name, node in _classes(tree.body)}


def _classes(body: Sequence[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield within + node.name, node
            yield from _classes(node.body, f"{within}{node.name}.")


def _of_attributes(body: Sequence[ast.stmt]) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(under.value.value)
        for field, under in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant) and isinstance(under.value.value, str)
    }
