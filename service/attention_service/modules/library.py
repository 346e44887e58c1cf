"""The owner of all resident modules. It creates, imports, returns, replaces and deletes them.

A module never changes: a replacement puts a new one in its place, and a request that holds the old one keeps it. A
change of a durable module is on the disk before others see it; a module that is not durable never touches the disk.
Every method blocks and may be called from any thread.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from attention_contract.errors import AttentionError, InternalError, ModuleExists, ModuleNotFound, VersionMismatch
from attention_contract.schemas.modules import CreateModule, ImportModule, ModuleConfig
from attention_contract.tensors import Array
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.checkpoints import import_plan as checkpoints
from attention_service.modules.parameter_input import config_of, to_parameters
from attention_service.modules.resident import Module, check_shapes, making_bytes
from attention_service.modules.store import DamagedError, MovedOnError, Stamp, Store
from attention_service.modules.store_files import reason, refusal

RETRY_S = 30.0
"""Seconds after which modules that were set aside are tried again although their files are unchanged."""
_NAMES_IN_MESSAGE = 10
Problems = list[str]
"""Modules that could not be loaded, one sentence each."""
Modules = list[Module]


class Library:
    """Every module on one device, backed by the store under ``root``."""

    def __init__(self, root: Path, device: torch.device) -> None:
        self.root = root
        self.device = device
        self._store = Store(root)
        self._modules: dict[str, Module] = {}
        self.resident_bytes = 0
        """Bytes of all parameters on the device."""
        self.limit: int | None = None
        """The most bytes of parameters for which modules are loaded from the store; None: any number."""
        self.admitted: Callable[[int], AbstractContextManager[object]] = nullcontext
        """Waits for the memory of a module that another process stored, and holds it while the module is loaded."""
        self.problems: dict[str, str] = {}
        """A sentence for each module that could not be read; the empty name stands for the whole store."""
        self._stamps: dict[str, Stamp] = {}
        self._retried = time.monotonic()
        """The time when all modules that were set aside were last tried again."""
        self._condition = threading.Condition()
        self._changing_names: set[str] = set()

    @property
    def left_out(self) -> int:
        """The number of stored modules that are not served, or 1 if the store cannot be read."""
        return len(self.problems)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, on_loaded: Callable[[Module], object] | None = None) -> Problems:
        """Remove what crashes left in the store, and make its modules resident; ``on_loaded`` is called with each.

        Return a sentence for each module that could not be read. Its files stay on the disk unchanged.
        """
        self._store.clean()
        return self.refresh(on_loaded)

    def refresh(self, on_loaded: Callable[[Module], object] | None = None) -> Problems:
        """Take over what other processes changed in the store: new modules, new versions, removals.

        Returns problems as ``load`` does. A module that is resident stays so when the store can no longer be read.
        """
        self._stamps = {}
        self.follow(on_loaded)
        return list(self.problems.values())

    def follow(self, on_loaded: Callable[[Module], object] | None = None) -> Problems:
        """Take over what other processes changed in the store since the last call, and return the new problems.

        It reads the status of each config.json, and only files that changed.
        """
        before = self.problems
        try:
            stamps = self._store.stamps()
        except OSError as fault:
            lost = not isinstance(fault, FileNotFoundError) or any(x.durable for x in self._snapshot().values())
            self.problems = {"": f"the store of modules cannot be read: {reason(fault)}"} if lost else {}
            return _new(self.problems, before)
        resident = {name for name, module in self._snapshot().items() if module.durable}
        known = {name: text for name, text in before.items() if name in stamps}
        if time.monotonic() - self._retried >= RETRY_S:
            self._retried = time.monotonic()
            self._stamps = {name: stamp for name, stamp in self._stamps.items() if name not in known}
        for name in sorted({*stamps, *resident}):
            if name in stamps and name in self._stamps and stamps[name] == self._stamps[name]:
                continue
            known.pop(name, None)
            if (problem := self._taken_over(name, on_loaded)) is not None:
                known[name] = problem
        self._stamps = stamps
        self.problems = known
        return _new(known, before)

    def _taken_over(self, name: str, on_loaded: Callable[[Module], object] | None) -> str | None:
        """Bring one module to its stored version; a sentence if that cannot be read."""
        try:
            # The memory comes first: a change that has its own waits for nobody who waits for memory.
            with self.admitted(self._missing_bytes(name)), self._changing(name):
                changed = self._refresh(name)
        except DamagedError as fault:
            return f"module {name!r}: {fault}; restore its folder in the store, or remove it"
        except (OSError, RuntimeError) as fault:  # the disk fails, or the device has no room
            return f"module {name!r} could not be loaded: {reason(fault)}"
        except AttentionError as fault:  # the memory budget has none
            return f"module {name!r} could not be loaded: {fault.detail}"
        if changed is not None and on_loaded is not None:
            on_loaded(changed)
        return None

    def _missing_bytes(self, name: str) -> int:
        """Bytes of a stored module that is not resident at its version, and that the limit allows."""
        resident = self._modules.get(name)
        if resident is not None and not resident.durable:
            return 0
        need = self._store.needed_bytes(name, None if resident is None else resident.version)
        return need if self.limit is None or need <= self.limit - self.resident_bytes else 0

    def _refresh(self, name: str) -> Module | None:
        """Bring one module to its stored version; the new module, or None where nothing new is resident."""
        resident = self._modules.get(name)
        if resident is not None and not resident.durable:
            return None
        version = self._store.version(name)
        if version is None:
            self._forget(name)
            return None
        if resident is not None and resident.version == version:
            return None
        free_bytes = (
            None if self.limit is None else self.limit - self.resident_bytes + (resident.bytes if resident else 0)
        )
        loaded = self._store.load(name, free_bytes)
        return self._put(loaded.on(self.device)) if loaded is not None else None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, name: str, version: str | None = None) -> Module:
        """A resident module. Raises ModuleNotFound, or VersionMismatch where a pinned version no longer holds."""
        module = self._modules.get(name)
        if module is None:
            raise ModuleNotFound(f"no module is named {name[:128]!r}; {self._existing()}", param="name")
        if version is not None:
            module.check_version(version)
        return module

    def holds(self, module: Module) -> bool:
        """True if a module of this name is resident at this version."""
        return self._modules.get(module.name) is module

    def list(self) -> Modules:
        """Every resident module, by name."""
        return [module for _, module in sorted(self._snapshot().items())]

    def estimate(self, request: CreateModule | ImportModule) -> int:
        """Peak bytes of the creation of the requested module; nothing is allocated.

        Raises what ``create`` or ``import_checkpoint`` would say of its names, shapes and dtypes.
        """
        if isinstance(request, ImportModule):
            return making_bytes(checkpoints.plan(self.root, request).config)
        return making_bytes(config_of(request))

    # ── changing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, request: CreateModule) -> tuple[Module, bool]:
        """A module of a seed or of given parameters, and whether it is new: the same content is made only once.

        Raises InvalidRequest, InvalidTensor or ShapeMismatch for parameters that do not fit, and ModuleExists where the
        name stands for something else.
        """
        config = config_of(request)
        with self._changing(request.name):
            self._check_free(request.name, config, durable=request.durable)
            dtype = config.dtype or "float32"
            parameters = (
                initial_parameters(Sizes.of(config), request.seed or 0, TORCH_DTYPES[dtype])
                if request.parameters is None
                else to_parameters(request.parameters, dtype)
            )
            return self._add(Module.of(request.name, config, parameters, durable=request.durable))

    def import_checkpoint(self, request: ImportModule) -> tuple[Module, bool]:
        """A module of one attention layer of a checkpoint, and whether it is new, as for ``create``.

        Raises CheckpointNotFound, InvalidCheckpoint, InvalidRequest where the request must say more, and ModuleExists.
        """
        plan = checkpoints.plan(self.root, request)
        with self._changing(plan.name):
            self._check_free(plan.name, plan.config, durable=request.durable)
            return self._add(Module.of(plan.name, plan.config, plan.read(), plan.source, durable=request.durable))

    def replace(self, name: str, parameters: Mapping[str, Array], version: str | None = None) -> Module:
        """Replace all parameters of a module, or none; they are cast to its dtype. Only a durable one is stored.

        Raises InvalidRequest unless the names are the module's, ShapeMismatch unless the shapes are, InvalidTensor
        where a number is too large for the dtype, ModuleNotFound, and VersionMismatch where a pin no longer holds.
        """
        with self._changing(name), self._guarded(name):
            self._refresh(name)
            present = self.get(name)
            check_shapes(present.config, {given: value.shape for given, value in parameters.items()})
            values = to_parameters(parameters, present.config.dtype or "float32")
            made = Module.of(name, present.config, values, present.source, durable=present.durable)
            if made.version == present.version:
                return (
                    present  # done already: a request whose reply was lost may come again, its pin outdated by itself
                )
            present.check_version(version)
            resident = made.on(self.device)
            if made.durable:
                self._store.save(made, present.version)
            return self._put(resident)

    def delete(self, name: str, version: str | None = None) -> None:
        """Remove a module from the device and the store. Raises ModuleNotFound and VersionMismatch."""
        with self._changing(name), self._guarded(name):
            self._refresh(name)
            present = self.get(name, version)
            if present.durable:
                self._store.delete(name, present.version)
            self._forget(name)

    def _check_free(self, name: str, config: ModuleConfig, *, durable: bool) -> None:
        """Raise ModuleExists where the name stands for something that is certainly different."""
        try:
            self._refresh(name)
        except DamagedError as fault:
            raise ModuleExists(
                f"the store has a module {name!r} that cannot be read: {fault}; take another name, restore its folder, "
                "or remove it by hand",
                param="name",
            ) from None
        existing = self._modules.get(name)
        if existing is not None and (existing.config, existing.durable) != (config, durable):
            raise _taken(existing)

    def _add(self, made: Module) -> tuple[Module, bool]:
        existing = self._modules.get(made.name)
        if existing is None and not made.durable:
            return self._put(made.on(self.device)), True
        if existing is None:
            with self._guarded(made.name):
                resident = made.on(self.device)  # before it is durable: what the device has no room for is not kept
                try:
                    self._store.save(made, None)
                    return self._put(resident), True
                except MovedOnError:  # another process made it meanwhile
                    self._refresh(made.name)
            existing = self.get(made.name)
        if existing.version != made.version:
            raise _taken(existing)
        return existing, False

    # ── the table of modules ─────────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self) -> dict[str, Module]:
        with self._condition:
            return dict(self._modules)

    def _put(self, module: Module) -> Module:
        with self._condition:
            self._modules[module.name] = module
            self._count()
        return module

    def _forget(self, name: str) -> None:
        with self._condition:
            self._modules.pop(name, None)
            self._count()

    def _count(self) -> None:
        self.resident_bytes = sum(module.bytes for module in self._modules.values())

    def _existing(self) -> str:
        names = sorted(self._snapshot())
        if not names:
            return "there is none; create or import one"
        more = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
        return f"there are {', '.join(names[:_NAMES_IN_MESSAGE])}{more}"

    @contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        """One change of a name at a time; other names go on."""
        with self._condition:
            self._condition.wait_for(lambda: name not in self._changing_names)
            self._changing_names.add(name)
        try:
            yield
        finally:
            with self._condition:
                self._changing_names.discard(name)
                self._condition.notify_all()

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Translate the store's faults to errors of the contract, and refresh the table from the store."""
        try:
            yield
        except MovedOnError:
            self._recover(name)
            raise VersionMismatch(
                f"module {name!r} was changed by another server at the same time; read it and try again",
                param="version",
            ) from None
        except DamagedError as fault:
            if name not in self._modules:
                raise ModuleNotFound(
                    f"no module is named {name!r}; the store has a folder of this name that cannot be read: {fault}. "
                    "Restore it, or remove it by hand",
                    param="name",
                ) from None
            raise InternalError(
                f"the stored module {name!r} cannot be read: {fault}; restore its folder, or remove it by hand"
            ) from None
        except OSError as fault:
            self._recover(name)
            raise refusal(fault, f"module {name!r}", ", or create it with durable: false") from fault

    def _recover(self, name: str) -> None:
        try:
            self._refresh(name)
        except (DamagedError, OSError):
            return  # as it was


def _new(problems: Mapping[str, str], before: Mapping[str, str]) -> Problems:
    return [text for name, text in problems.items() if before.get(name) != text]


def _taken(existing: Module) -> ModuleExists:
    return ModuleExists(
        f"a module named {existing.name!r} is there already, with other content or another durability (version "
        f"{existing.version}, durable {str(existing.durable).lower()}); "
        "take another name, replace its parameters, or delete it first",
        param="name",
        version=existing.version,
    )
