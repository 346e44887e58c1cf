"""Adapters beside a loaded model: each row of a pass has the base's numbers, or those of one adapter.

The modules of the base stay as they are. A hook behind each module that an adapter changes adds s·B·A·x to the rows of
this adapter. In a pass whose rows have several adapters, the matrices of these are joined: each row is multiplied by
all A, and what is another adapter's is replaced by 0 before the product with B. It is replaced, not multiplied by 0,
because a product that is infinite stays so; and B is finite (``applied_change``). Source: Sheng et al. 2023, S-LoRA.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from attention_contract.errors import AttentionError, InvalidCheckpoint
from attention_service.models.loaded.adapter_changes import (
    AppliedChange,
    add_change,
    applied_change,
    as_wide,
    project_down,
    without_bias,
)
from attention_service.models.passes.module_hooks import change_outputs, noting_calls
from attention_service.modules.checkpoints.adapter_files import MERGE, AdapterFiles

_FAULTS: Final = (AttentionError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""The errors of a model that does not take two rows."""
_NO_ROWS: Final = "the rows of a pass cannot be told apart in a module that an adapter changes"


@dataclass(eq=False)
class Adapter:
    """An adapter of a model."""

    name: str
    files: AdapterFiles
    changes: dict[nn.Module, AppliedChange]
    mark: object = field(default_factory=object)
    """Stands for the adapter where it is not to be kept in memory."""
    mixes: bool = False
    """True if rows of one pass may have it while others have not."""

    @property
    def numbers(self) -> int:
        """The numbers by which each token is multiplied: those of A and B, but for an embedding's A."""
        every = self.changes.values()
        downs = sum(change.down.numel() for change in every if change.down is not None and not change.embeds)
        return downs + sum(change.up.numel() for change in every if change.up is not None)


@dataclass
class _Joined:
    """The changes of one module by several adapters."""

    down: Tensor | None
    """``[Σ r, in]``, or of an embedding ``[tokens, Σ r]``"""
    up: Tensor | None
    """``[out, Σ r]``"""
    ranks: tuple[int, ...]
    """The rank of each adapter, 0 for one that does not change the module."""
    changes: list[AppliedChange | None]
    embeds: bool
    replaces: bool
    gains: bool
    offsets: bool


@dataclass
class RowMix:
    """A pass whose rows have several adapters."""

    rows: tuple[Adapter | None, ...]
    adapters: tuple[Adapter, ...]
    """The adapters whose matrices are joined: all that rows have, and maybe more."""
    joined: dict[nn.Module, _Joined]
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _shares: dict[nn.Module, Tensor] = field(default_factory=dict)

    def apply(self, module: nn.Module, args: Sequence[Any], output: Tensor) -> Tensor:
        """The output of a module, each row with the change of its adapter. Raises RuntimeError if x has other rows."""
        x = args[0]
        if (one := self.joined.get(module)) is None:
            one = self.joined[module] = _join(module, self.adapters)
        if len(x) != len(self.rows) or x.ndim < (2 if isinstance(module, nn.Embedding) else 3):
            raise RuntimeError(_NO_ROWS)
        for adapter, change in zip(self.adapters, one.changes, strict=True) if one.replaces else ():
            if change is not None and change.replaced is not None and adapter in self.rows:
                own = torch.tensor([at for at, row in enumerate(self.rows) if row is adapter], device=x.device)
                made = as_wide(change.replaced, output)(x.index_select(0, own))
                output = output.index_copy(0, own, made.to(output.dtype))
        if one.gains:
            gain = self._by_row(module, one, output)
            gained = output + (gain * without_bias(module, output)).to(output.dtype)
            output = torch.where(gain == 0, output, gained)  # 0 times infinity is no 0
        if one.down is None or one.up is None:
            return output
        low = project_down(x, one.down, embeds=one.embeds)
        others = self._others(one.ranks, one.up)
        low = low.masked_fill(others if low.ndim == 2 else others.view(len(x), *[1] * (low.ndim - 2), -1), 0)
        return add_change(output, low, one.up, self._offsets(one, output))

    def _others(self, ranks: tuple[int, ...], like: Tensor) -> Tensor:
        """Bool ``[rows, Σ r]``: True where a column belongs to an adapter that the row does not have."""
        if (mask := self._masks.get(ranks)) is None:
            with torch.inference_mode(mode=False):
                blocks = [
                    torch.tensor([row is not joined_adapter for row in self.rows]).view(-1, 1).expand(-1, rank)
                    for joined_adapter, rank in zip(self.adapters, ranks, strict=True)
                ]
                mask = self._masks[ranks] = torch.cat(blocks, 1).to(like.device)
        return mask

    def _by_row(self, module: nn.Module, one: _Joined, output: Tensor) -> Tensor:
        """DoRA's factor less 1 for each row ``[rows, 1, out]``, 0 for rows without."""
        if (shares := self._shares.get(module)) is None:
            with torch.inference_mode(mode=False):
                none = torch.zeros(output.shape[-1], device=output.device)
                gains = {
                    adapter: change.gain
                    for adapter, change in zip(self.adapters, one.changes, strict=True)
                    if change is not None and change.gain is not None
                }
                shares = torch.stack([none if row is None else gains.get(row, none) for row in self.rows])
                self._shares[module] = shares
        return shares.view(len(self.rows), *[1] * (output.ndim - 2), -1)

    def _offsets(self, one: _Joined, output: Tensor) -> Tensor | None:
        """The biases of B for each row; None if no adapter has any."""
        if not one.offsets:
            return None
        offsets = {
            adapter: change.offset
            for adapter, change in zip(self.adapters, one.changes, strict=True)
            if change is not None and change.offset is not None
        }
        none = torch.zeros(output.shape[-1], device=output.device)
        stacked = torch.stack([none if row is None else offsets.get(row, none) for row in self.rows])
        return stacked.view(len(self.rows), *[1] * (output.ndim - 2), -1)


class Adapters:
    """The adapters of one model, and the one that the pass under way has."""

    def __init__(self, model: PreTrainedModel, two_rows: Callable[[], None]) -> None:
        """``two_rows`` runs the model over a short text twice, as two rows of one pass."""
        self._model, self._two_rows = model, two_rows
        self.bytes: dict[str, int] = {}
        """Bytes that each adapter takes, its joined matrices included, by name."""
        self._known: dict[str, Adapter] = {}
        self._adapted: set[nn.Module] = set()
        self.active: Adapter | None = None
        """The adapter of all rows; None for the base."""
        self._mix: RowMix | None = None
        self._last: RowMix | None = None
        """The last pass whose rows had several, whose joined matrices others may have."""

    def known(self, name: str, written: int) -> Adapter | None:
        """The adapter of a name, if it was loaded from files as old."""
        adapter = self._known.get(name)
        return adapter if adapter is not None and adapter.files.written == written else None

    def load(self, name: str, files: AdapterFiles) -> Adapter:
        """Load an adapter, and let it take the place of one of its name. Raises InvalidCheckpoint."""
        changes = {}
        modules = dict(self._model.named_modules())
        paths = _Paths(self._model, modules)
        for path, change in files.changes().items():
            module = modules.get(paths.find(path))
            if module is None:
                raise InvalidCheckpoint.at(
                    "adapter",
                    f"{name} changes {path}, and {type(self._model).__name__} has no module of this name: it is of "
                    "another base, or of another class of it, such as one with a head for classes; load it with its "
                    f"own base, or {MERGE}",
                )
            if (made := applied_change(name, path, change, module, self._model)) is not None:
                changes[module] = made
        adapter = Adapter(name, files, changes, mixes=self._keeps_rows(changes))
        for module in changes.keys() - self._adapted:
            change_outputs(module, self._changed)
            self._adapted.add(module)
        self.forget(name)
        self._known[name], self.bytes[name] = adapter, needed_bytes(files.bytes)
        return adapter

    def forget(self, name: str) -> None:
        """Free an adapter; texts that run with it keep it until they end."""
        self._known.pop(name, None)
        self.bytes.pop(name, None)
        self._last = None

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Give all rows of the passes in a block one adapter, or the base's own numbers."""
        former = self.active, self._mix
        self.active, self._mix = adapter, None
        try:
            yield
        finally:
            self.active, self._mix = former

    @contextmanager
    def of_rows(self, rows: Sequence[Adapter | None]) -> Iterator[None]:
        """Give each row of the passes in a block its adapter."""
        if all(row is rows[0] for row in rows):
            with self.using(rows[0]):
                yield
            return
        former = self.active, self._mix
        self.active, self._mix = None, self._mixed(tuple(rows))
        try:
            yield
        finally:
            self.active, self._mix = former

    @property
    def may_mix(self) -> bool:
        """True if rows of the pass under way may have the base's numbers beside those of the adapter."""
        return self.active is None or self.active.mixes

    @contextmanager
    def beside_base(self, count: int) -> Iterator[None]:
        """Give the first rows of the passes in a block their adapters, and as many more the base's own numbers."""
        own = [self.active] * count if self._mix is None else [*self._mix.rows]
        with self.of_rows([*own, *[None] * count]):
            yield

    def _keeps_rows(self, modules: Iterable[nn.Module]) -> bool:
        """True if these modules get the rows of a pass as rows; experts, for one, get the tokens of all rows."""
        seen: list[bool] = []

        def look(module: nn.Module, args: Sequence[Any], _: Mapping[str, Any]) -> None:
            least = 2 if isinstance(module, nn.Embedding) else 3
            seen.append(bool(args) and args[0].ndim >= least and len(args[0]) == 2)

        with noting_calls(modules, look), self.using(None), torch.no_grad():
            try:
                self._two_rows()
            except _FAULTS:
                return False
        return bool(seen) and all(seen)

    def _mixed(self, rows: tuple[Adapter | None, ...]) -> RowMix:
        last, wanted = self._last, {row for row in rows if row is not None}
        if last is not None and last.rows == rows:
            return last
        if last is not None and wanted <= {*last.adapters}:
            self._last = RowMix(rows, last.adapters, last.joined)
        else:
            self._last = RowMix(rows, tuple(sorted(wanted, key=lambda adapter: adapter.name)), {})
        return self._last

    def _changed(self, module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], output: Any) -> Any:
        if self._mix is not None:
            return self._mix.apply(module, args, output)
        change = None if self.active is None else self.active.changes.get(module)
        return None if change is None else change.rows(module, args, options, output)


def needed_bytes(file_bytes: int) -> int:
    """Estimate the memory of an adapter by that of its file: in float32, and once more where it is joined."""
    return 4 * file_bytes


class _Paths:
    """The modules of a model by the paths that they have in an adapter."""

    def __init__(self, model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._prefix = modules, f"{model.base_model_prefix}."
        self._renamings = [
            conversion for conversion in get_model_conversion_mapping(model) if isinstance(conversion, WeightRenaming)
        ]

    def find(self, path: str) -> str | None:
        """The path of a module: the same, with or without that of a head's base, or as transformers renames it."""
        renamed = apply_renamings(f"{path}.weight", self._renamings).removesuffix(".weight")
        for spelling in (path, renamed):
            for name in (spelling, self._prefix + spelling, spelling.removeprefix(self._prefix)):
                if name in self._modules:
                    return name
        return None


def _join(module: nn.Module, adapters: Sequence[Adapter]) -> _Joined:
    """The changes of a module by several adapters, their matrices joined."""
    changes = [adapter.changes.get(module) for adapter in adapters]
    able = [change for change in changes if change is not None and change.down is not None and change.up is not None]
    embeds = isinstance(module, nn.Embedding)
    ranks = tuple(0 if change is None or change.up is None else change.up.shape[1] for change in changes)
    every = [change for change in changes if change is not None]
    kinds = [any(getattr(change, name) is not None for change in every) for name in ("replaced", "gain", "offset")]
    if not able:
        return _Joined(None, None, ranks, changes, embeds, *kinds)
    downs, ups = [change.down for change in able], [change.up for change in able]
    with torch.inference_mode(mode=False):
        down = downs[0] if len(able) == 1 else torch.cat(downs, 1 if embeds else 0)  # type: ignore[arg-type]
        up = ups[0] if len(able) == 1 else torch.cat(ups, 1)  # type: ignore[arg-type]
    return _Joined(down, up, ranks, changes, embeds, *kinds)
