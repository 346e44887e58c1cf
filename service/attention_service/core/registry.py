"""Registries: the implementations of each part of a spec, by name.

A registry holds the entries of one kind. An entry is a class made from its options, registered beside its formula,
its asymptotic cost and its source; tests, benchmarks, docs and ``GET /v1/variants`` walk the registries.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any, Generic, Literal, TypeVar

from attention_contract.base import WireModel

_LOG = logging.getLogger(__name__)
Kind = Literal["score", "mask", "position", "normalizer", "method", "kernel"]
Part = TypeVar("Part")
Maker = TypeVar("Maker", bound=Callable[..., object])
_MOST_MADE = 1024
"""Parts that a registry remembers."""


@dataclass(frozen=True)
class Entry(Generic[Part]):
    """One way to compute one part of an attention."""

    kind: Kind
    name: str
    options: type[WireModel] | None
    """The class of its options in the contract; None for a kernel, which has none."""
    make: Callable[..., Part]
    """From options to what computes; a kernel is made from nothing."""
    summary: str
    formula: str
    gradient: str
    """Formula of the backward pass, with ∂x for ∂L/∂x."""
    cost: str
    """Asymptotic, in the sequence length n and the head width d."""
    source: str

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the options."""
        return self.options.model_json_schema() if self.options else {"type": "object", "properties": {}}


class Registry(Generic[Part]):
    """The entries of one kind, by name."""

    def __init__(self, kind: Kind, *, group: str | None = None) -> None:
        """Create an empty registry. ``group``: the entry points by which installed packages register more."""
        self.kind = kind
        self._entries: dict[str, Entry[Part]] = {}
        self._group = group
        self._made: dict[int, tuple[WireModel, Part]] = {}
        """Parts by the identity of their options, which it keeps alive."""

    def register(
        self, options: type[WireModel] | str, *, formula: str, gradient: str, cost: str, source: str
    ) -> Callable[[Maker], Maker]:
        """Register the decorated class under the name of its options (or, for a kernel, under this name)."""

        def add(make: Maker) -> Maker:
            name = options if isinstance(options, str) else _name(options)
            if name in self._entries:
                raise ValueError(f"two entries of the {self.kind} registry are called {name}")
            documented = make if isinstance(options, str) else options
            self._entries[name] = Entry[Part](
                kind=self.kind,
                name=name,
                options=None if isinstance(options, str) else options,
                make=make,  # type: ignore[arg-type]  # what computes a part is a class with that part's protocol
                summary=(documented.__doc__ or "").strip().partition("\n")[0],
                formula=formula,
                gradient=gradient,
                cost=cost,
                source=source,
            )
            return make

        return add

    def of(self, options: WireModel) -> Part:
        """Return the implementation of the part that these options describe: one object for the same options."""
        made = self._made.get(id(options))
        if made is None:
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            made = self._made[id(options)] = options, self[_name(type(options))].make(options)
        return made[1]

    def __getitem__(self, name: str) -> Entry[Part]:
        return self._all()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[Entry[Part]]:
        return iter(self._all().values())

    def _all(self) -> dict[str, Entry[Part]]:
        """Return all entries; the first call imports those of installed packages."""
        group, self._group = self._group, None
        for point in metadata.entry_points(group=group) if group else ():
            try:
                point.load()  # its module registers it
                if point.name not in self._entries:
                    raise LookupError(f"{point.value} registers no {self.kind} of this name")
            except Exception:  # a package that is broken must not keep the server from starting
                _LOG.exception("%s %s of an installed package is left out", self.kind, point.name)
        return self._entries


def variants() -> list[Entry[Any]]:
    """Every entry of every registry, kind by kind."""
    # Imported here, because each of these imports this module to register its entries.
    core = __name__.rpartition(".")[0]
    modules = ("scores", "masks", "positions", "normalizers", "methods", "kernels")
    return [entry for name in modules for entry in getattr(import_module(f"{core}.{name}"), name.upper())]


@cache
def _name(options: type[WireModel]) -> str:
    return str(options.model_fields["name"].default)
