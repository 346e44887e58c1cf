"""Stand-ins for modules that PyTorch and transformers import, and that the process of a model does not need.

PyTorch's compiler, symbolic sizes, and what losses and statistics need of SciPy and scikit-learn, would take a third of
the start of a process and a quarter of its memory. A stand-in that is used after all imports the module.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final


def _as_given(value: Any = None, *_: Any, **__: Any) -> Any:
    """Return the value; without one, as of a decorator with options, this function."""
    return _as_given if value is None else value


_UNUSED: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "torch._dynamo": dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _as_given),
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "statically_known_true"), _as_given),
        "is_nested_int": lambda _: False,
        "sym_and": lambda *parts: all(parts),
        "sym_eq": operator.eq,
        "sym_or": lambda *parts: any(parts),
    },
    "sympy": {},
    "scipy.optimize": {},
    "sklearn.metrics": {},
}
"""The modules, each before those that it imports, and their functions that need no import here.

A decorator of the compiler returns what it gets, and so does a question about a bool that is no symbol.
"""


class _Finder:
    """Finds a stand-in for each module that is left out, and for each below it."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the description of a stand-in, or None for a module that is imported as ever."""
        return ModuleSpec(name, self, is_package=True) if self.root(name) else None  # type: ignore[arg-type]

    def root(self, name: str) -> str | None:
        """The module that is left out and is, or holds, this one."""
        return next((left_out for left_out in self.left_out if f"{name}.".startswith(f"{left_out}.")), None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has its attributes when they are asked for."""

    def give_up(self, root: str) -> None:
        """Leave out this module, and those that it may import, no longer."""
        place = self.left_out.index(root)
        for name in [module_name for module_name in sys.modules if self.root(module_name) in self.left_out[place:]]:
            parent, _, child = name.rpartition(".")
            del sys.modules[name]
            if parent in sys.modules and isinstance(vars(sys.modules[parent]).get(child), _StandIn):
                delattr(sys.modules[parent], child)
        del self.left_out[place:]


_FINDER: Final[Any] = _Finder()


def leave_out(*, spread: bool = False) -> None:
    """Let later imports of these modules, and of PyTorch's division over machines, find stand-ins.

    ``spread``: the process has a part of a model, which needs that division.
    """
    if _FINDER in sys.meta_path or sys.modules.keys() & _UNUSED.keys():
        return
    _FINDER.left_out[:] = _UNUSED
    sys.meta_path.insert(0, _FINDER)
    if spread:
        return
    import torch  # noqa: PLC0415

    torch.distributed.is_available = lambda: False  # as in builds of PyTorch without it, which transformers obeys


class _StandIn(ModuleType):
    """A module that is imported only when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _UNUSED.get(self.__name__, {}).get(name) or _Later(self.__name__, name)


@dataclass(frozen=True)
class _Later:
    """A function, a class or a module below an unused module, which is imported when this is used."""

    module: str
    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._itself(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._itself, name)

    def __instancecheck__(self, instance: object) -> bool:
        return not _FINDER.root(self.module) and isinstance(instance, self._itself)  # there is none before the import

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._itself,)

    @property
    def _itself(self) -> Any:
        if (root := _FINDER.root(self.module)) is not None:
            _FINDER.give_up(root)
        return getattr(importlib.import_module(self.module), self.name)
