"""The attention blocks of a checkpoint, found by the names of its tensors, and the one that a request means."""

import re
from dataclasses import dataclass
from typing import Final

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint
from attention_service.modules.checkpoints.layouts import LAYOUTS, Layout, Part

_LISTED: Final = 20
_STACK: Final = re.compile(r"(?:^|\.)(encoder|decoder)(?=\.|$)")


@dataclass(frozen=True)
class Block:
    """One attention block of a checkpoint."""

    layout: Layout
    prefix: str
    """The text before the names of its tensors."""
    layer: int
    part: Part | None
    """None if the names do not say, as for a module that stands alone."""
    stack: str | None


def blocks_of(checkpoint: Checkpoint) -> list[Block]:
    """Return every attention block with the tensor names of a known layout, layer by layer."""
    found: dict[str, Block] = {}
    for layout in LAYOUTS:
        for name in checkpoint.names:
            tensor = next((tensor for tensor in layout.tensors if name == tensor or name.endswith(f".{tensor}")), None)
            match = layout.block.fullmatch(name.removesuffix(tensor)) if tensor is not None else None
            if match is not None:
                stacks = _STACK.findall(match["path"] or "")
                found[match[0]] = Block(
                    layout,
                    match[0],
                    int(match["layer"] or 0),
                    layout.parts[match["part"]] if match["part"] else None,
                    stacks[-1] if stacks else None,
                )
    return sorted(found.values(), key=lambda block: (block.layer, block.prefix))


def choose(blocks: list[Block], request: ImportModule) -> Block:
    """Return the block that a request names.

    Raises InvalidCheckpoint if there is none or if several match, InvalidRequest if ``stack`` would decide.
    """
    if not blocks:
        raise InvalidCheckpoint(
            "the checkpoint holds no attention layer in a known layout "
            f"({', '.join(layout.name for layout in LAYOUTS)})",
            param="checkpoint",
        )
    fitting = [block for block in blocks if block.part in {request.part, None}]
    if request.stack is not None:
        fitting = [block for block in fitting if block.stack in {request.stack, None}]
    chosen = [block for block in fitting if block.layer == request.layer]
    if not chosen:
        layers = sorted({block.layer for block in fitting})
        kind = f"{request.stack} {request.part}" if request.stack else request.part
        raise InvalidCheckpoint(
            f"the checkpoint has no {kind}-attention in layer {request.layer}; "
            + (f"there is one in {_ranges(layers)}" if layers else f"it has only {_parts(blocks)}"),
            param="layer" if layers else "part",
            layers=layers[:1000],
        )
    if len(chosen) == 1:
        return chosen[0]
    stacks = sorted({block.stack for block in chosen if block.stack is not None})
    if request.stack is None and len(stacks) > 1:
        raise InvalidRequest(
            f"the checkpoint has {request.part}-attention in layer {request.layer} of its {' and its '.join(stacks)}; "
            "say which by stack",
            param="stack",
            stacks=stacks,
        )
    places = [block.prefix for block in chosen]
    raise InvalidCheckpoint(
        f"the checkpoint has {len(places)} such layers, at {', '.join(places[:_LISTED])}; "
        "save the one that is meant as a checkpoint of its own",
        param="checkpoint",
    )


def _ranges(layers: list[int]) -> str:
    """Layers in words: ``layers 0 to 11``, or a list where some are missing."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    more = " …" if len(layers) > _LISTED else ""
    return f"layers {', '.join(map(str, layers[:_LISTED]))}{more}"


def _parts(blocks: list[Block]) -> str:
    kinds = {f"{block.stack} {block.part}-attention" if block.stack else f"{block.part}-attention" for block in blocks}
    return " and ".join(sorted(kinds))
