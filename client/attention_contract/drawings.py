"""The modules that draw replies, which the entry points ``attention.pictures`` name: the contract imports none."""

from functools import cache
from importlib.metadata import entry_points
from types import ModuleType


@cache
def drawing_module(kind: str) -> ModuleType:
    """Load the module that draws ``figures``, or the maps of a ``notebook``."""
    (point,) = entry_points(group="attention.pictures", name=kind)
    module: ModuleType = point.load()
    return module
