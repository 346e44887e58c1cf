"""Resident modules: making, importing, describing and replacing them."""

from collections.abc import Sequence
from typing import Literal

from attention_client.arguments import (
    ConfigLike,
    SpecLike,
    TensorMap,
)
from attention_client.calls import call
from attention_client.importing import OnImported, imports_of
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.modules import ModuleInfo, ModuleList, Parameter, ParameterList, Stack


class Modules(Resource):
    """Calls that manage resident modules."""

    def list(self) -> ModuleList:
        """List every resident module."""
        return self.send(call(operations.list_modules, {}))

    def create(
        self, name: str, config: ConfigLike, *, seed: int | None = None, parameters: TensorMap | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from a seed (0 by default) or from all of its parameters, by name.

        ``durable=False`` keeps it in the server's memory alone, until the server stops: a change of its parameters then
        writes nothing to a disk. Raises ModuleExists if a different module has the name.
        """
        return self.send(call(operations.create_module, locals()))

    def import_(
        self, checkpoint: str, *, layer: int = 0, name: str | None = None, part: Literal["self", "cross"] = "self",
        stack: Stack | None = None, spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from one attention layer of a checkpoint in the server's model repository.

        ``layer`` counts from 0. ``name`` is by default folder.layer. ``stack`` is needed if a checkpoint has several,
        ``num_heads`` if it does not tell. The fields that are set in ``spec`` replace those of the checkpoint: a torch
        state dict needs ``{"masks": [], "add_zero_attn": False}`` or other values.
        """
        return self.send(call(operations.import_module, locals()))

    def import_all(
        self, checkpoint: str, *, spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True, on_imported: OnImported | None = None,
    ) -> Sequence[ModuleInfo]:  # fmt: skip
        """Make a module from every attention layer of a checkpoint, or from none.

        Names are those of ``client.checkpoints.get``: ``gpt2.0``, ``t5.decoder.0.cross``. ``spec``, ``num_heads``
        and ``durable`` go with each import. If one fails, those that this call made are deleted again. After each
        import, ``on_imported`` is called with the module, its number from 1, and the number of all.
        """
        found = self.send(call(operations.get_checkpoint, {"path": checkpoint}))
        imports = imports_of(found, {"spec": spec, "num_heads": num_heads, "durable": durable})
        listed = self.list()
        resident = {module.name for module in listed.modules}
        made: dict[str, ModuleInfo] = {}
        try:
            for number, arguments in enumerate(imports, 1):
                module = self.send(call(operations.import_module, arguments))
                made[module.name] = module
                if on_imported is not None:
                    on_imported(module, number, len(imports))
        except BaseException:
            for name in made.keys() - resident:
                self.delete(name)
            raise
        return [*made.values()]

    def get(self, name: str) -> ModuleInfo:
        """Return config, version, device and bytes of a module."""
        return self.send(call(operations.get_module, locals()))

    def delete(self, name: str, version: str | None = None) -> None:
        """Remove a module; with a version, only if it is still at that version."""
        return self.send(call(operations.delete_module, locals()))

    def parameters(self, name: str) -> ParameterList:
        """List names, shapes and statistics of a module's parameters."""
        return self.send(call(operations.list_parameters, locals()))

    def parameter(
        self, name: str, parameter: str, *, head: int | None = None, slice: str | None = None,  # noqa: A002
        version: str | None = None,
    ) -> Parameter:  # fmt: skip
        """Return one parameter, the part of one head, or a slice of it such as ``"0:4,:8"``."""
        return self.send(call(operations.get_parameter, locals()))

    def replace_parameters(self, name: str, parameters: TensorMap, *, version: str | None = None) -> ModuleInfo:
        """Replace all parameters of a module, or none; with a version, only if it is still at that version."""
        return self.send(call(operations.replace_parameters, locals()))


class AsyncModules(AsyncResource):
    """The same calls as ``Modules``, awaited."""

    async def list(self) -> ModuleList:
        """List every resident module."""
        return await self.send(call(operations.list_modules, {}))

    async def create(
        self, name: str, config: ConfigLike, *, seed: int | None = None, parameters: TensorMap | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from a seed (0 by default) or from all of its parameters, by name.

        ``durable=False`` keeps it in the server's memory alone, until the server stops: a change of its parameters then
        writes nothing to a disk. Raises ModuleExists if a different module has the name.
        """
        return await self.send(call(operations.create_module, locals()))

    async def import_(
        self, checkpoint: str, *, layer: int = 0, name: str | None = None, part: Literal["self", "cross"] = "self",
        stack: Stack | None = None, spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from one attention layer of a checkpoint in the server's model repository.

        ``layer`` counts from 0. ``name`` is by default folder.layer. ``stack`` is needed if a checkpoint has several,
        ``num_heads`` if it does not tell. The fields that are set in ``spec`` replace those of the checkpoint: a torch
        state dict needs ``{"masks": [], "add_zero_attn": False}`` or other values.
        """
        return await self.send(call(operations.import_module, locals()))

    async def import_all(
        self, checkpoint: str, *, spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True, on_imported: OnImported | None = None,
    ) -> Sequence[ModuleInfo]:  # fmt: skip
        """Make a module from every attention layer of a checkpoint, or from none.

        Names are those of ``client.checkpoints.get``: ``gpt2.0``, ``t5.decoder.0.cross``. ``spec``, ``num_heads``
        and ``durable`` go with each import. If one fails, those that this call made are deleted again. After each
        import, ``on_imported`` is called with the module, its number from 1, and the number of all.
        """
        found = await self.send(call(operations.get_checkpoint, {"path": checkpoint}))
        imports = imports_of(found, {"spec": spec, "num_heads": num_heads, "durable": durable})
        listed = await self.list()
        resident = {module.name for module in listed.modules}
        made: dict[str, ModuleInfo] = {}
        try:
            for number, arguments in enumerate(imports, 1):
                module = await self.send(call(operations.import_module, arguments))
                made[module.name] = module
                if on_imported is not None:
                    on_imported(module, number, len(imports))
        except BaseException:
            for name in made.keys() - resident:
                await self.delete(name)
            raise
        return [*made.values()]

    async def get(self, name: str) -> ModuleInfo:
        """Return config, version, device and bytes of a module."""
        return await self.send(call(operations.get_module, locals()))

    async def delete(self, name: str, version: str | None = None) -> None:
        """Remove a module; with a version, only if it is still at that version."""
        return await self.send(call(operations.delete_module, locals()))

    async def parameters(self, name: str) -> ParameterList:
        """List names, shapes and statistics of a module's parameters."""
        return await self.send(call(operations.list_parameters, locals()))

    async def parameter(
        self, name: str, parameter: str, *, head: int | None = None, slice: str | None = None,  # noqa: A002
        version: str | None = None,
    ) -> Parameter:  # fmt: skip
        """Return one parameter, the part of one head, or a slice of it such as ``"0:4,:8"``."""
        return await self.send(call(operations.get_parameter, locals()))

    async def replace_parameters(self, name: str, parameters: TensorMap, *, version: str | None = None) -> ModuleInfo:
        """Replace all parameters of a module, or none; with a version, only if it is still at that version."""
        return await self.send(call(operations.replace_parameters, locals()))
