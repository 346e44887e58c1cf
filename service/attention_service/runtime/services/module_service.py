"""Resident modules and the checkpoints that they are imported from: what requests change, and what they see of it."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from attention_contract.errors import InvalidRequest, StoreFull
from attention_contract.schemas.checkpoints import (
    CheckpointInfo,
    CheckpointList,
    CheckpointReply,
    FetchCheckpoint,
)
from attention_contract.schemas.modules import (
    CreateModule,
    ImportModule,
    ModuleInfo,
    ModuleList,
    Parameter,
    ParameterList,
    ParameterQuery,
    ReplaceParameters,
)
from attention_service.core.tensors import to_numpy
from attention_service.modules import parameters
from attention_service.modules.checkpoints import catalogue
from attention_service.modules.library import Library
from attention_service.modules.resident import Module, making_bytes
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.services.checkpoint_fetches import CheckpointFetches
from attention_service.runtime.services.kept_passes import KeptPasses


class ModuleService:
    """Answers requests about modules. Used from the event loop only."""

    def __init__(
        self,
        library: Library,
        runner: RequestRunner,
        passes: KeptPasses,
        max_modules: int,
        hub_limit: int,
        *,
        siblings: bool = False,
    ) -> None:
        """``siblings``: other processes serve the same modules."""
        self._library = library
        self._runner = runner
        self._budget = runner.budget
        self._passes = passes
        self._max_modules = max_modules
        self._siblings = siblings
        self.fetches = CheckpointFetches(library.root, hub_limit)
        self._makers: dict[str, str] = {}
        """The caller who made each module since the start."""

    async def create(self, request: CreateModule) -> ModuleInfo:
        """Make a module resident, and durable unless the request says otherwise."""
        return await self._add(request, partial(self._library.create, request))

    async def import_checkpoint(self, request: ImportModule) -> ModuleInfo:
        """Make a module of one layer of a checkpoint."""
        return await self._add(request, partial(self._library.import_checkpoint, request))

    async def checkpoints(self) -> CheckpointList:
        """Every checkpoint of the model repository, by its headers, and those that are being fetched."""
        catalogued = await self._runner.in_thread(partial(catalogue.listed, self._library.root))
        coming = [CheckpointInfo(**fetch.model_dump(exclude={"attentions"})) for fetch in self.fetches.under_way()]
        return CheckpointList(checkpoints=sorted(catalogued.checkpoints + coming, key=attrgetter("path")))

    async def checkpoint(self, path: str) -> CheckpointReply:
        """One checkpoint. Raises CheckpointNotFound and InvalidCheckpoint."""
        if (coming := self.fetches.find(path)) is not None:
            return coming
        return await self._runner.in_thread(partial(catalogue.described, self._library.root, path))

    async def fetch_checkpoint(self, request: FetchCheckpoint) -> CheckpointReply:
        """Fetch a checkpoint from the hub. Raises what ``CheckpointFetches.fetch`` does."""
        self._runner.check_ready()
        return await self.fetches.fetch(request) or await self.checkpoint(request.repository)

    async def _add(self, request: CreateModule | ImportModule, add: Callable[[], tuple[Module, bool]]) -> ModuleInfo:
        self._runner.check_ready()
        if self._siblings and not request.durable:
            raise InvalidRequest.at(
                "durable",
                "expected true: several processes serve the modules of one store (ATTENTION_REPLICAS), and the others "
                "would not see a module in the memory of this process",
            )
        self._check_count(request.name)
        asks = caller.get()
        made = sum(
            self._makers.get(stored.name) == asks.name for stored in self._library.list() if stored.name != request.name
        )
        asks.check("modules", made + 1, f"{made} resident modules are yours; delete one first")
        need = await self._runner.in_thread(partial(self._library.estimate, request))
        self._budget.check(need, "making the module needs {need} bytes", "Make a smaller one: its config sets its size")
        module, is_new = await self._runner.holding(need, add, on_device=True)
        if is_new:
            self._makers[module.name] = asks.name
        return module.info()

    def _check_count(self, name: str | None) -> None:
        names = [module.name for module in self._library.list()]
        if len(names) >= self._max_modules and name not in names:
            raise StoreFull(
                f"the server has {len(names)} modules; max_modules allows {self._max_modules}. Delete one first",
                limit=self._max_modules,
                actual=len(names) + 1,
            )

    def get(self, name: str, version: str | None = None) -> Module:
        """A resident module. Raises ModuleNotFound, or VersionMismatch where it is no longer at the version."""
        self._runner.check_ready()
        return self._library.get(name, version)

    def list(self) -> ModuleList:
        """Every resident module."""
        self._runner.check_ready()
        return ModuleList(
            modules=[module.info() for module in self._library.list()], bytes=self._library.resident_bytes
        )

    async def delete(self, name: str, version: str | None = None) -> None:
        """Remove a module from the device and the store."""
        self._runner.check_ready()
        await self._runner.in_thread(partial(self._library.delete, name, version))
        self._makers.pop(name, None)
        self._passes.drop_of(name)
        self._budget.wake()

    async def replace(self, name: str, request: ReplaceParameters) -> ModuleInfo:
        """Replace all parameters of a module, or none."""
        need = making_bytes(self.get(name).config)  # its pin is checked with the write
        replace = partial(self._library.replace, name, request.parameters, request.version)
        info = (await self._runner.holding(need, replace, on_device=True)).info()
        self._passes.drop_of(name)
        return info

    async def parameters(self, name: str, version: str | None = None) -> ParameterList:
        """Names, shapes and statistics of a module's parameters."""
        return await self._runner.in_thread(partial(parameters.describe, self.get(name, version)))

    async def parameter(self, name: str, parameter: str, query: ParameterQuery) -> Parameter:
        """One parameter, or a part of it."""
        module = self.get(name, query.version)
        value = await self._runner.in_thread(lambda: to_numpy(parameters.read(module, parameter, query)))
        return Parameter(name=parameter, version=module.version, value=value)
