"""Resident modules: making, importing, describing and replacing them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal, Unpack

from attention_client.arguments import ConfigLike, SpecLike, TensorMap
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Flow, Group, WayT, method
from attention_contract import operations
from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply, FetchProgress
from attention_contract.schemas.modules import ModuleInfo, ModuleList, Parameter, ParameterList, Stack

OnProgress = Callable[[FetchProgress], object]
"""Called with the progress of a fetch."""
PROGRESS_S: Final = 1.0
"""Seconds between two reports of it."""
OnImported = Callable[[ModuleInfo, int, int], object]
"""Called after each import with the module, its number from 1, and the number of all."""


class Modules(Group[WayT]):
    """Calls that manage resident modules."""

    @method
    def list(self, **options: Unpack[CallOptions]) -> Call[ModuleList]:
        """List every resident module."""
        return call(operations.list_modules, locals())

    @method
    def create(
        self, name: str, config: ConfigLike, *, seed: int | None = None, parameters: TensorMap | None = None,
        durable: bool = True, **options: Unpack[CallOptions],
    ) -> Call[ModuleInfo]:  # fmt: skip
        """Make a module from a seed (0 by default) or from all of its parameters, by name.

        ``durable=False`` keeps it in the server's memory alone, until the server stops: a change of its parameters then
        writes nothing to a disk. Raises ModuleExists if a different module has the name.
        """
        return call(operations.create_module, locals())

    @method
    def import_(
        self, checkpoint: str, *, adapter: str | None = None, layer: int = 0, name: str | None = None,
        part: Literal["self", "cross"] = "self", stack: Stack | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True, **options: Unpack[CallOptions],
    ) -> Call[ModuleInfo]:  # fmt: skip
        """Make a module from one attention layer of a checkpoint in the server's model repository.

        ``adapter`` is the path of an adapter of it, which is merged. ``layer`` counts from 0. ``name`` is by default
        folder.layer. ``stack`` is needed if a checkpoint has several,
        ``num_heads`` if it does not tell. The fields that are set in ``spec`` replace those of the checkpoint: a torch
        state dict needs ``{"masks": [], "add_zero_attn": False}`` or other values.
        """
        return call(operations.import_module, locals())

    @method
    def import_all(
        self, checkpoint: str, *, spec: SpecLike | None = None, num_heads: int | None = None,
        durable: bool = True, on_imported: OnImported | None = None, **options: Unpack[CallOptions],
    ) -> Flow[Sequence[ModuleInfo]]:  # fmt: skip
        """Make a module from every attention layer of a checkpoint, or from none.

        Names are those of ``client.checkpoints.get``: ``gpt2.0``, ``t5.decoder.0.cross``. ``spec``, ``num_heads``
        and ``durable`` go with each import. If one fails, those that this call made are deleted again. After each
        import, ``on_imported`` is called with the module, its number from 1, and the number of all.
        ``timeout`` is that of each import.
        """
        checkpoint_reply = yield call(operations.get_checkpoint, {"path": checkpoint, "options": options})
        imports = imports_of(checkpoint_reply, {"spec": spec, "num_heads": num_heads, "durable": durable})
        listed = yield call(operations.list_modules, {"options": options})
        resident = {module.name for module in listed.modules}
        made: dict[str, ModuleInfo] = {}
        try:
            for number, arguments in enumerate(imports, 1):
                module = yield call(operations.import_module, {**arguments, "options": options})
                made[module.name] = module
                if on_imported is not None:
                    on_imported(module, number, len(imports))
        except BaseException:
            for name in made.keys() - resident:
                yield call(operations.delete_module, {"name": name, "options": options})
            raise
        return [*made.values()]

    @method
    def get(self, name: str, **options: Unpack[CallOptions]) -> Call[ModuleInfo]:
        """Return config, version, device and bytes of a module."""
        return call(operations.get_module, locals())

    @method
    def delete(self, name: str, version: str | None = None, **options: Unpack[CallOptions]) -> Call[None]:
        """Remove a module; with a version, only if it is still at that version."""
        return call(operations.delete_module, locals())

    @method
    def parameters(self, name: str, **options: Unpack[CallOptions]) -> Call[ParameterList]:
        """List names, shapes and statistics of a module's parameters."""
        return call(operations.list_parameters, locals())

    @method
    def parameter(
        self, name: str, parameter: str, *, head: int | None = None, slice: str | None = None,  # noqa: A002
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> Call[Parameter]:  # fmt: skip
        """Return one parameter, the part of one head, or a slice of it such as ``"0:4,:8"``."""
        return call(operations.get_parameter, locals())

    @method
    def replace_parameters(
        self, name: str, parameters: TensorMap, *, version: str | None = None, **options: Unpack[CallOptions]
    ) -> Call[ModuleInfo]:
        """Replace all parameters of a module, or none; with a version, only if it is still at that version."""
        return call(operations.replace_parameters, locals())


class Checkpoints(Group[WayT]):
    """Calls about checkpoints."""

    @method
    def list(self, **options: Unpack[CallOptions]) -> Call[CheckpointList]:
        """List every checkpoint of the model repository: family, layers, widths and bytes. Nothing is loaded."""
        return call(operations.list_checkpoints, locals())

    @method
    def get(self, path: str, **options: Unpack[CallOptions]) -> Call[CheckpointReply]:
        """Describe a checkpoint: the name, config and spec of each attention layer that could be imported.

        Raises CheckpointNotFound, or InvalidCheckpoint for files that cannot be read.
        """
        return call(operations.get_checkpoint, locals())

    @method
    def fetch(
        self, repository: str, *, revision: str | None = None, on_progress: OnProgress | None = None,
        **options: Unpack[CallOptions],
    ) -> Flow[CheckpointReply]:  # fmt: skip
        """Let the server fetch a repository of the Hugging Face hub, such as ``openai-community/gpt2``.

        ``on_progress`` is called with the progress about once a second; ``timeout`` is then that of each request. The
        server goes on if the caller leaves: ``cancel_fetch`` stops it. Raises Forbidden unless the server's operator
        allows it, CheckpointNotFound, StoreFull if it is too large, Conflict if it was cancelled, and Unavailable if
        the hub cannot be reached.
        """
        wait_s = None if on_progress is None else PROGRESS_S
        fields = {"repository": repository, "revision": revision, "wait_s": wait_s, "options": options}
        reply: CheckpointReply = yield call(operations.fetch_checkpoint, fields)
        while reply.fetch is not None:
            if on_progress is not None:
                on_progress(reply.fetch)
            reply = yield call(operations.fetch_checkpoint, fields)
        return reply

    @method
    def cancel_fetch(self, path: str, **options: Unpack[CallOptions]) -> Call[None]:
        """Stop a fetch, of which nothing is kept. Raises CheckpointNotFound if there is none."""
        return call(operations.cancel_fetch, locals())


def imports_of(checkpoint: CheckpointReply, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of the import of each layer, by the description of a checkpoint.

    ``arguments``: those of all of them, ``num_heads`` and ``spec``. Raises InvalidCheckpoint if there is no layer or if
    one cannot be imported, InvalidRequest if one needs an argument that is not given.
    """
    if checkpoint.problem is not None or not checkpoint.attentions:
        raise InvalidCheckpoint(checkpoint.problem or f"{checkpoint.path} has no attention layer", param="checkpoint")
    for attention in checkpoint.attentions:
        if attention.problem is not None:
            raise InvalidCheckpoint(f"{attention.name}: {attention.problem}", param="checkpoint")
        lacking = [field for field in attention.missing if not _is_given(field, arguments)]
        if lacking:
            raise InvalidRequest(
                f"{attention.name}: the checkpoint does not state {', '.join(lacking)}; send it", param=lacking[0]
            )
    return [
        {
            "checkpoint": checkpoint.path,
            "layer": layer.layer,
            "name": layer.name,
            "part": layer.part,
            "stack": layer.stack,
        }
        | {name: value for name, value in arguments.items() if value is not None}
        for layer in checkpoint.attentions
    ]


def _is_given(field: str, arguments: dict[str, Any]) -> bool:
    """True if the arguments have a field, which may be dotted."""
    name, _, inner = field.partition(".")
    value = arguments.get(name)
    if not inner or value is None:
        return value is not None
    given: Collection[str] = value if isinstance(value, dict) else value.model_fields_set
    return inner in given
