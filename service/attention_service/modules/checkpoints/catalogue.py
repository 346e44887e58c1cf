"""The checkpoints of the model repository and their attention layers, by configs and headers alone."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attention_contract.errors import AttentionError, InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.checkpoints import CheckpointAttention, CheckpointInfo, CheckpointList, CheckpointReply
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    adapter_at,
    base_instead,
)
from attention_service.modules.checkpoints.attention_blocks import CheckpointBlock, blocks_of, lack_of_blocks
from attention_service.modules.checkpoints.checkpoint_files import (
    OWN_FOLDERS,
    TINY,
    Checkpoint,
    inside,
    is_kept,
    open_checkpoint,
    ships,
)
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GGUF
from attention_service.modules.checkpoints.import_plan import default_name, missing_fields, plan_block
from attention_service.modules.resident import parameter_bytes
from attention_service.modules.store_files import reason

_DEPTH: Final = 4
"""Folders below the repository that are looked through."""
_LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
"""Names of the parts of a divided GGUF file after its first."""
_MAX_LISTED: Final = 1000
"""Checkpoints that are listed."""


def listed(root: Path) -> CheckpointList:
    """Describe every checkpoint of the model repository in short, by path."""
    checkpoints = []
    for path in paths(root):
        try:
            checkpoints.append(CheckpointInfo(**described(root, path).model_dump(exclude={"attentions"})))
        except Exception as fault:  # whatever a folder holds, the others are listed
            checkpoints.append(CheckpointInfo(path=path, bytes=0, problem=unreadable_reason(fault)))
        if len(checkpoints) == _MAX_LISTED:
            break
    return CheckpointList(checkpoints=checkpoints)


def paths(root: Path) -> Iterator[str]:
    """Yield the paths of single safetensors files in the repository, and of folders with tensors or a config.json.

    A GGUF file alone has the path of its folder; of several, or beside safetensors files, each has its own.

    The checkpoint that ships is the first. Links to folders are not followed, and hidden folders are left out.
    """
    if ships(root):
        yield TINY
    top = root.resolve()
    for folder, folders, entries in os.walk(top):
        place = Path(folder).relative_to(top)
        below = [] if len(place.parts) >= _DEPTH else sorted(folders)
        files = entries
        if place.parts and place.parts[0] in OWN_FOLDERS:
            below = [name for name in below if not is_kept(top, top / place / name)]
            files = [name for name in entries if not is_kept(top, top / place / name)]
        folders[:] = [name for name in below if name[0] != "."]
        tensors = sorted(file for file in files if file.endswith(".safetensors"))
        ggufs = sorted(file for file in files if file.endswith(GGUF) and not _LATER_PART.search(file))
        others = ADAPTER_CONFIG in files or ("config.json" in files and len(ggufs) < 2) or len(ggufs) == 1
        if place.parts and (tensors or others):
            yield place.as_posix()
        elif not place.parts:
            yield from tensors
        if not place.parts or tensors or len(ggufs) > 1:
            yield from ((place / file).as_posix() for file in ggufs)


def unreadable_reason(fault: Exception) -> str:
    """Return the reason for which a checkpoint cannot be described."""
    return fault.detail if isinstance(fault, AttentionError) else f"it cannot be read: {reason(fault)[:200]}"


def described(root: Path, path: str) -> CheckpointReply:
    """Describe a checkpoint and each of its attention layers. Raises CheckpointNotFound and InvalidCheckpoint."""
    if (adapter := adapter_at(root, path)) is not None:
        file = inside(root, adapter, ADAPTER_TENSORS)
        size = 0 if file is None else file.stat().st_size
        return CheckpointReply(path=path, bytes=size, problem=base_instead(root, adapter))
    checkpoint = open_checkpoint(root, path)
    size = sum(file.stat().st_size for file in checkpoint.files)
    model_type = None
    try:
        kind = checkpoint.config.get("model_type")
        model_type = kind[:80] if isinstance(kind, str) else None
        blocks = blocks_of(checkpoint)
    except InvalidCheckpoint as fault:
        return CheckpointReply(path=path, model_type=model_type, bytes=size, problem=fault.detail)
    if not blocks:
        return CheckpointReply(path=path, model_type=model_type, bytes=size, problem=lack_of_blocks(checkpoint))
    stacks = {block.stack for block in blocks}
    attentions = [_attention(checkpoint, block, several=len(stacks) > 1) for block in blocks]
    config = next((attention.config for attention in attentions if attention.config is not None), None)
    return CheckpointReply(
        path=path,
        family=blocks[0].family.name,
        model_type=model_type,
        bytes=size,
        layers=len({(block.stack, block.layer) for block in blocks}),
        heads=None if config is None else config.num_heads,
        d_model=None if config is None else config.d_model,
        attentions=attentions,
    )


def _attention(checkpoint: Checkpoint, block: CheckpointBlock, *, several: bool) -> CheckpointAttention:
    part = block.part or "self"
    request = ImportModule(checkpoint=checkpoint.label, layer=block.layer, part=part, stack=block.stack)
    attention = CheckpointAttention(
        name=default_name(checkpoint.label, block.layer, part, block.stack if several else None),
        layer=block.layer,
        part=part,
        stack=block.stack,
    )
    try:
        if missing := missing_fields(checkpoint, block):
            return attention.model_copy(update={"missing": missing})
        plan = plan_block(checkpoint, block, request)
    except InvalidRequest as fault:  # InvalidCheckpoint among them
        return attention.model_copy(update={"problem": fault.detail})
    size = parameter_bytes(plan.config)
    return attention.model_copy(
        update={"config": plan.config, "bytes": size, "tensors": plan.tensors, "ignored": plan.source.ignored}
    )
