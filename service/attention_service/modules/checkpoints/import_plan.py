"""Import one attention layer of a checkpoint in the model repository.

``plan`` reads headers only; the tensors that are needed are read when the plan is carried out. Nothing is unpickled,
and nothing outside the repository is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, ShapeMismatch
from attention_contract.schemas.modules import ImportModule, ModuleConfig, Source
from attention_contract.spec import AttentionSpec
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.modules.checkpoints.attention_blocks import Block, blocks_of, choose
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint, open_checkpoint
from attention_service.modules.checkpoints.layouts import Layout, Piece
from attention_service.modules.resident import biases_in, check_shapes, complete


@dataclass(frozen=True)
class Plan:
    """An import, decided from names, shapes and config.json."""

    name: str
    config: ModuleConfig
    """Complete."""
    source: Source
    _checkpoint: Checkpoint
    _pieces: Mapping[str, Piece]
    """The tensors, by their full names, that hold each parameter."""

    def read(self) -> dict[str, Tensor]:
        """The parameters, on the host. Raises InvalidCheckpoint where the file does not hold what its header says."""
        values = {name: self._read(piece) for name, piece in self._pieces.items()}
        try:
            check_shapes(self.config, {name: tuple(value.shape) for name, value in values.items()})
            changed = {value.dtype for value in values.values()} != {TORCH_DTYPES[self.config.dtype or "float32"]}
        except ShapeMismatch:
            changed = True
        if changed:
            raise InvalidCheckpoint("the checkpoint changed while it was read; try again", param="checkpoint")
        return values

    def _read(self, piece: Piece) -> Tensor:
        value = self._checkpoint.read(piece.tensor, piece.part, piece.of)
        return value.reshape(_flattened(tuple(value.shape))) if piece.flat else value


def plan(root: Path, request: ImportModule) -> Plan:
    """Decide an import from headers alone; allocate nothing.

    Raises CheckpointNotFound, InvalidCheckpoint where no such layer can be read, and InvalidRequest where the request
    must say more (``stack``, ``num_heads``) or contradicts the checkpoint.
    """
    checkpoint = open_checkpoint(root, request.checkpoint)
    block = choose(blocks_of(checkpoint), request)
    part = block.part or request.part
    facts = checkpoint.config
    if block.stack is not None and isinstance(facts.get(block.stack), dict):
        facts = facts[block.stack]  # a pair of models keeps a config for each
    _check_computation(block, checkpoint, facts)
    pieces = _pieces(block, checkpoint)
    spec = block.layout.spec(facts, part, pieces)
    config = _config(pieces, spec, checkpoint, _heads(block.layout, facts, request), request)
    return Plan(
        name=request.name or default_name(checkpoint.label, request.layer),
        config=config,
        source=Source(
            checkpoint=PurePosixPath(request.checkpoint).as_posix(),
            layout=block.layout.name,
            layer=request.layer,
            part=part,
            stack="encoder" if block.stack == "encoder" else "decoder" if block.stack == "decoder" else None,
        ),
        _checkpoint=checkpoint,
        _pieces=pieces,
    )


def default_name(label: str, layer: int) -> str:
    """A module's name from that of its checkpoint, what a name may not hold replaced: ``minilm.0``."""
    ending = f".{layer}"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).lstrip("._-") or "checkpoint"
    return stem[: 128 - len(ending)] + ending


# ── what it computes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _check_computation(block: Block, checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    """Raise InvalidCheckpoint where the layer computes something that a module would not."""
    layout = block.layout
    for tensor, meaning in layout.unsupported.items():
        if block.prefix + tensor in checkpoint.names:
            raise InvalidCheckpoint(
                f"{block.prefix}{tensor} is {meaning}, which is not supported", param="checkpoint", tensor=tensor
            )
    model_type = facts.get("model_type")
    if layout.model_types is not None and model_type is not None and model_type not in layout.model_types:
        raise InvalidCheckpoint(
            f"config.json says model_type {str(model_type)[:80]!r}, which is not known to compute the attention of "
            f"layout {layout.name!r}; known are {', '.join(sorted(layout.model_types))}",
            param="checkpoint",
        )
    for entry, values in layout.required_config.items():
        if facts.get(entry) is not None and facts[entry] not in values:
            raise InvalidCheckpoint(
                f"config.json says {entry} {str(facts[entry])[:80]!r}, which is not supported; "
                f"expected {' or '.join(map(repr, values))}",
                param="checkpoint",
            )


def _heads(layout: Layout, facts: Mapping[str, Any], request: ImportModule) -> int:
    told = next((facts[entry] for entry in layout.head_counts if _is_count(facts.get(entry))), None)
    heads = told if request.num_heads is None else request.num_heads
    if heads is None:
        raise InvalidRequest(
            "neither the request nor a config.json beside the tensors tells the number of heads; give num_heads",
            param="num_heads",
        )
    if told is not None and heads != told:
        raise InvalidRequest(
            f"num_heads is {heads}, but config.json says {told}; leave it out, or correct it",
            param="num_heads",
            expected=told,
            actual=heads,
        )
    return heads


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


# ── its tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _pieces(block: Block, checkpoint: Checkpoint) -> dict[str, Piece]:
    pieces: dict[str, Piece] = {}
    missing = []
    for parameter, places in block.layout.pieces.items():
        full = [replace(piece, tensor=block.prefix + piece.tensor) for piece in places]
        piece = next((piece for piece in full if piece.tensor in checkpoint.names), None)
        if piece is not None:
            pieces[parameter] = piece
        elif parameter.endswith(".weight"):
            missing.append(" or ".join(piece.tensor for piece in full))
    for one, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if one in pieces and other not in pieces:
            missing.append(block.prefix + other)
    if missing:
        raise InvalidCheckpoint(f"the checkpoint lacks {', '.join(missing)}", param="checkpoint", missing=missing)
    return pieces


def _config(
    pieces: Mapping[str, Piece], spec: AttentionSpec, checkpoint: Checkpoint, heads: int, request: ImportModule
) -> ModuleConfig:
    """The complete config that the shapes amount to. Shapes as in the table of parameters of a module."""
    headers = {parameter: checkpoint.header(piece.tensor) for parameter, piece in pieces.items()}
    dtypes = sorted({header.dtype for header in headers.values()})
    if len(dtypes) > 1:
        raise InvalidCheckpoint(f"the layer's tensors differ in dtype: {', '.join(dtypes)}", param="checkpoint")
    shapes = {}
    for parameter, piece in pieces.items():
        shape = _flattened(headers[parameter].shape) if piece.flat else headers[parameter].shape
        if len(shape) != (2 if parameter.endswith(".weight") else 1) or 0 in shape or shape[0] % piece.of:
            raise InvalidCheckpoint(
                f"{piece.tensor} has shape {list(shape)}, which no {parameter} has", param="checkpoint"
            )
        shapes[parameter] = (shape[0] // piece.of, *shape[1:])
    (q_rows, d_model), (k_rows, key_width) = shapes["q_proj.weight"], shapes["k_proj.weight"]
    v_rows, value_width = shapes["v_proj.weight"]
    head_dim = q_rows // heads
    kv_heads = k_rows // max(head_dim, 1)
    if q_rows % heads or k_rows % head_dim or v_rows % kv_heads or heads % kv_heads:
        error = InvalidCheckpoint if request.num_heads is None else InvalidRequest
        raise error(
            f"{heads} heads do not divide the layer's projections of {q_rows} (query), {k_rows} (key) and {v_rows} "
            "(value) rows",
            param="checkpoint" if request.num_heads is None else "num_heads",
            num_heads=heads,
            rows=[q_rows, k_rows, v_rows],
        )
    try:
        config = complete(
            ModuleConfig.model_validate(
                {
                    "d_model": d_model,
                    "num_heads": heads,
                    "num_kv_heads": kv_heads,
                    "head_dim": head_dim,
                    "value_dim": v_rows // kv_heads,
                    "key_width": key_width,
                    "value_width": value_width,
                    "bias": biases_in(pieces),
                    "dtype": dtypes[0],
                    "spec": spec,
                }
            )
        )
        check_shapes(config, shapes)
    except ValidationError as fault:
        first = fault.errors()[0]
        raise InvalidCheckpoint(
            f"no module can have the layer's sizes: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            param="checkpoint",
        ) from None
    except ShapeMismatch as fault:
        raise InvalidCheckpoint(
            f"the layer's tensors do not fit each other: {fault.detail}", param="checkpoint", **fault.facts
        ) from None
    return config


def _flattened(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading dimensions of 1, but for the last."""
    leading = next((at for at, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return shape[leading:]
