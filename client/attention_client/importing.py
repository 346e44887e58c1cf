"""The import of every attention layer of a checkpoint."""

from collections.abc import Callable, Collection
from typing import Any

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.checkpoints import CheckpointReply
from attention_contract.schemas.modules import ModuleInfo

OnImported = Callable[[ModuleInfo, int, int], object]
"""Called after each import with the module, its number from 1, and the number of all."""


def imports_of(found: CheckpointReply, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of the import of each layer, by the description of a checkpoint.

    ``told`` are arguments for all of them: ``num_heads``, ``spec``. Raises InvalidCheckpoint if there is no layer or if
    one cannot be imported, InvalidRequest if one needs an argument that is not told.
    """
    if found.problem is not None or not found.attentions:
        raise InvalidCheckpoint(found.problem or f"{found.path} has no attention layer", param="checkpoint")
    for each in found.attentions:
        if each.problem is not None:
            raise InvalidCheckpoint(f"{each.name}: {each.problem}", param="checkpoint")
        lacking = [field for field in each.missing if not _is_told(field, told)]
        if lacking:
            raise InvalidRequest(
                f"{each.name}: the checkpoint does not tell {', '.join(lacking)}; give it", param=lacking[0]
            )
    return [
        {"checkpoint": found.path, "layer": each.layer, "name": each.name, "part": each.part, "stack": each.stack}
        | {name: value for name, value in told.items() if value is not None}
        for each in found.attentions
    ]


def _is_told(field: str, told: dict[str, Any]) -> bool:
    """True if the arguments have a field, which may be dotted."""
    name, _, inner = field.partition(".")
    value = told.get(name)
    if not inner or value is None:
        return value is not None
    given: Collection[str] = value if isinstance(value, dict) else value.model_fields_set
    return inner in given
