"""The sizes of one attention, and the facts about a request that determine its cost."""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.multihead import Sizes
from attention_service.core.problem import Widths

DIMENSIONS = (
    "length", "batch", "queries", "keys", "past", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_model",
)  # fmt: skip
"""The sizes that a sweep can vary: those of a request, then those of a model."""


@dataclass(frozen=True)
class Workload(Extent):
    """One attention, described by its sizes alone, and the facts about a request that determine its cost."""

    own_key_dim: int | None = None
    """Width of the keys where it differs from ``head_dim``, as raw attention by an additive or bilinear score may."""
    reply: str = ""
    """The dtype of the reply, if it is known."""
    sizes: Sizes | None = None
    """The module's widths; None for raw attention, which has no projections."""
    taps: frozenset[str] = frozenset({"output"})
    """Returned taps."""
    selected_heads: int | None = None
    """Number of selected heads of those taps; None for all."""
    selected_queries: int | None = None
    """Number of selected queries of those taps; None for all."""
    averaged: bool = False
    """True if returned weights are averaged over these heads."""
    bool_mask: bool = False
    """True if the request's mask is boolean; otherwise it is added."""
    batched_places: bool = False
    """True if rows of the batch have different places in a position encoding."""
    edits: tuple[tuple[str, str], ...] = ()
    """The tap of each edit, and its action: ``set``, ``value``, ``scale`` or ``renormalize``."""
    edit_elements: int = 0
    """Elements of the edits' values."""
    reported: bool = False
    """True if the request wants the error against exact attention."""
    compared: bool = False
    """True if the request wants the differences from attention without its edits."""
    inputs: frozenset[str] = frozenset({"query", "key", "value"})
    """Names of distinct input tensors: self-attention has the query alone."""
    wrt: frozenset[str] = frozenset({"inputs", "parameters"})
    """Targets of gradients: a request's inputs, the learned parameters."""

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Return a key that is equal for equal workloads alone."""
        sizes = self.sizes
        widths = None if sizes is None else (sizes.d_model, *sizes.inputs, sizes.biases.model_dump_json())
        return self.spec.model_dump_json(), widths, *(getattr(self, name) for name in _HASHABLE)

    def __eq__(self, other: object) -> bool:
        """True for a workload of the same sizes and facts."""
        return isinstance(other, Workload) and self.key == other.key

    def __hash__(self) -> int:
        """Hash the key: a spec has lists."""
        return hash(self.key)

    @property
    def edited(self) -> bool:
        """True if a tap is edited."""
        return bool(self.edits)

    @property
    def unedited(self) -> "Workload":
        """The same workload without its edits."""
        return replace(self, edits=(), edit_elements=0, compared=False)

    @property
    def apart(self) -> int:
        """Number of queries per sequence with projections of their own, at most."""
        if self.sizes is None:
            return 0
        return min(len(separate_positions(self.spec.masks)), self.queries)

    @property
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""
        return None if self.sizes is None else self.sizes.d_model

    @property
    def widths(self) -> Widths:
        """Widths that determine the shapes of the spec's learned tensors."""
        return Widths(self.heads, self.kv_heads, self.head_dim, self.value_dim, self.d_model, self.own_key_dim)

    @property
    def key_dim(self) -> int:
        """Width of the keys."""
        return self.own_key_dim or self.head_dim

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head over the batch: B · Q · K."""
        return self.batch * self.queries * self.keys

    @property
    def decode(self) -> "Workload":
        """Return the decode step that ends with the same keys: one query and one new key of each sequence."""
        return replace(self, queries=1, past=self.sequence_keys - 1)

    def at(self, dimension: str, value: int) -> "Workload":
        """Return the same workload with one size of a sweep changed.

        ``keys`` are the new ones, ``length`` is queries and new keys together; a width changes others, as in
        ``resized``. Raises ValueError for an impossible size.
        """
        match dimension:
            case "length":
                return replace(self, queries=value, keys=self.past + value + self.added_keys)
            case "batch":
                return replace(self, batch=value)
            case "queries":
                return replace(self, queries=value)._inputs_apart()
            case "keys":
                return replace(self, keys=self.past + value + self.added_keys)._inputs_apart()
            case "past":
                return replace(self, past=value, keys=self.new_keys + value + self.added_keys)
            case _:
                if dimension not in DIMENSIONS:
                    raise ValueError(f"dimension {dimension!r}: expected {', '.join(DIMENSIONS)}")
                return self.resized(**{dimension: value})

    def value(self, dimension: str) -> int:
        """Return the size that ``at`` changes."""
        tokens = {"length": self.queries, "batch": self.batch, "queries": self.queries, "keys": self.new_keys}
        widths = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        model = {"value_dim": self.value_dim, "d_model": self.d_model or 0, "past": self.past}
        return (tokens | widths | model)[dimension]

    def _inputs_apart(self) -> "Workload":
        """Give the keys a tensor of their own, unless there are as many queries as keys."""
        return self if self.queries == self.new_keys else replace(self, inputs=frozenset({"query", "key", "value"}))

    def resized(self, **told: int) -> "Workload":
        """Return the same workload with other widths, all at once, by the names of a config.

        Other widths follow: ``num_kv_heads`` ``num_heads`` and ``value_dim`` ``head_dim`` where they are equal,
        the widths of keys and values ``d_model`` where they equal it, and ``head_dim`` is d_model / num_heads where the
        heads make up the width of the model. Raises ValueError for impossible widths.
        """
        sizes = self.sizes
        if sizes is None and "d_model" in told:
            raise ValueError("raw attention has no d_model; vary head_dim or num_heads")
        heads = told.get("num_heads", self.heads)
        kv_heads = told.get("num_kv_heads", heads if self.kv_heads == self.heads else self.kv_heads)
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads {kv_heads} does not divide num_heads {heads}")
        head_dim = told.get("head_dim", self.head_dim)
        d_model = None if sizes is None else told.get("d_model", sizes.d_model)
        follows = sizes is not None and self.heads * self.head_dim == sizes.d_model and "head_dim" not in told
        if d_model is not None and follows:
            if d_model % heads:
                raise ValueError(f"d_model {d_model} is not a multiple of num_heads {heads}; give head_dim too")
            head_dim = d_model // heads
        value_dim = told.get("value_dim", head_dim if self.value_dim == self.head_dim else self.value_dim)
        widths = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        if sizes is not None and d_model is not None:
            inputs = {
                name: d_model if width == sizes.d_model else width
                for name, width in (("key_width", sizes.key_width), ("value_width", sizes.value_width))
            }
            sizes = replace(sizes, d_model=d_model, **inputs, **widths)  # type: ignore[arg-type]
        return replace(self, sizes=sizes, **widths)  # type: ignore[arg-type]  # the names are those of widths


_HASHABLE = tuple(each.name for each in fields(Workload) if each.name not in {"spec", "sizes"})
