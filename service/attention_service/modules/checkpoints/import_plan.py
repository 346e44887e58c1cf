"""Import one attention layer of a checkpoint in the model repository.

``plan`` reads headers only; the tensors that are needed are read when the plan is carried out. Nothing is unpickled,
and nothing outside the repository is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, ShapeMismatch
from attention_contract.schemas.modules import ImportModule, ModuleConfig, Source
from attention_contract.spec import AttentionSpec
from attention_service.core.methods import check_spec
from attention_service.core.multihead import Sizes, parameter_shapes
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.checkpoints.adapter_files import (
    ADAPTER_TENSORS,
    AdapterFiles,
    adapter_at,
    adapter_beside,
    base_instead,
)
from attention_service.modules.checkpoints.attention_blocks import (
    CheckpointBlock,
    blocks_of,
    check_quantization,
    choose,
    lack_of_blocks,
)
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint, folder_of, open_checkpoint
from attention_service.modules.checkpoints.cuts import HeadSizes
from attention_service.modules.checkpoints.families.biases import BIASES
from attention_service.modules.checkpoints.family import AttentionDescription, Entries, Part, Piece, described
from attention_service.modules.resident import biases_in, check_shapes, complete

_WEIGHTS = tuple(f"{role}_proj.weight" for role in "qkvo")
_DOWNS = {"q": "q", "k": "kv", "v": "kv"}
"""The projection to the latent that each projection may read."""
_COMPANIONS = (("bias_k", "bias_v"), ("bias_v", "bias_k"))


@dataclass(frozen=True)
class ImportPlan:
    """An import, decided from names, shapes and config.json."""

    name: str
    config: ModuleConfig
    """Complete."""
    source: Source
    _checkpoint: Checkpoint
    _pieces: Mapping[str, Piece]
    """The tensors, by their full names, that hold each parameter."""
    _heads: HeadSizes
    _adapter: AdapterFiles | None = None

    @property
    def tensors(self) -> dict[str, str]:
        """The full name of the tensor that holds each parameter."""
        return {name: piece.tensor for name, piece in self._pieces.items()}

    def read(self) -> dict[str, Tensor]:
        """The parameters, on the host. Raises InvalidCheckpoint where the file does not hold what its header says."""
        try:
            pieces = self._pieces.items()
            stored = {piece.tensor: self._checkpoint.read(piece.tensor) for _, piece in pieces}
            if self._checkpoint.are_packed(stored):
                stored = {name: value.float() for name, value in stored.items()}  # biases may be of another dtype
            if self._adapter is not None:
                stored = self._adapter.merged(stored)
            values = _copied({name: piece.cut(stored[piece.tensor], self._heads) for name, piece in pieces})
            check_shapes(self.config, {name: tuple(value.shape) for name, value in values.items()})
            changed = {value.dtype for value in values.values()} != {TORCH_DTYPES[self.config.dtype or "float32"]}
        except (ShapeMismatch, RuntimeError, IndexError):
            changed = True
        if changed:
            raise InvalidCheckpoint("the checkpoint changed while it was read; try again", param="checkpoint")
        return values


def _copied(cut: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of parts of stored tensors; the weights of q, k and v lie one after the other if they can.

    A module lays them out so, and thus needs no second copy.
    """
    parts = [cut[f"{role}_proj.weight"] for role in "qkv"]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in cut.items()}
    together = torch.cat(parts).split_with_sizes([len(part) for part in parts])
    joint = {f"{role}_proj.weight": part for role, part in zip("qkv", together, strict=True)}
    return {
        name: joint[name] if name in joint else value.clone(memory_format=torch.contiguous_format)
        for name, value in cut.items()
    }


def plan(root: Path, request: ImportModule) -> ImportPlan:
    """Decide an import from headers alone; allocate nothing.

    Raises CheckpointNotFound, InvalidCheckpoint where no such layer can be read, and InvalidRequest where the request
    must say more (``stack``, ``num_heads``, fields of ``spec``) or contradicts the checkpoint.
    """
    if (adapter := adapter_at(root, request.checkpoint)) is not None:
        raise InvalidCheckpoint.at("checkpoint", base_instead(root, adapter))
    checkpoint = open_checkpoint(root, request.checkpoint)
    blocks = blocks_of(checkpoint)
    if not blocks:
        raise InvalidCheckpoint.at("checkpoint", lack_of_blocks(checkpoint))
    import_plan = plan_block(checkpoint, choose(blocks, request), request)
    if request.adapter is not None:
        return _adapted(root, import_plan, checkpoint, request)
    beside = adapter_beside(root, request.checkpoint)
    return import_plan if beside is None else _without_adapter(root, import_plan, beside)


def _without_adapter(root: Path, import_plan: ImportPlan, folder: Path) -> ImportPlan:
    """The import of a layer beside which an adapter lies, and the reply says so."""
    path = folder.relative_to(root.resolve()).as_posix()
    left_out = f'{ADAPTER_TENSORS} (an adapter beside its base; "adapter": "{path}" merges it)'
    return replace(
        import_plan, source=import_plan.source.model_copy(update={"ignored": [*import_plan.source.ignored, left_out]})
    )


def _adapted(root: Path, import_plan: ImportPlan, checkpoint: Checkpoint, request: ImportModule) -> ImportPlan:
    """The import of a layer with an adapter. Raises CheckpointNotFound and InvalidCheckpoint."""
    path = (request.adapter or "").strip("/")
    adapter = AdapterFiles.open(folder_of(root, path), root)
    adapter.check()
    label = f"{checkpoint.label}-{Path(path).name}"
    name = request.name or default_name(label, request.layer, request.part, request.stack)
    source = import_plan.source.model_copy(update={"adapter": path})
    return replace(import_plan, name=name, source=source, _adapter=adapter)


def plan_block(checkpoint: Checkpoint, block: CheckpointBlock, request: ImportModule) -> ImportPlan:
    """Decide the import of one block of an opened checkpoint. Raises as ``plan`` does."""
    part = block.part or request.part
    pieces, ignored = _as_stated(checkpoint, block, part)
    attention = _counted(_described(block, part, pieces), request)
    spec = _overlaid(attention, request)
    heads, config = _config(pieces, attention, spec, checkpoint, request)
    pieces = {name: piece for name, piece in pieces.items() if name in parameter_shapes(Sizes.of(config))}
    return ImportPlan(
        name=request.name or default_name(checkpoint.label, request.layer, part, request.stack),
        config=config,
        source=Source(
            checkpoint=checkpoint.path,
            family=block.family.name,
            layer=request.layer,
            part=part,
            stack=block.stack,
            ignored=ignored,
            quantized=_form(checkpoint, pieces),
        ),
        _checkpoint=checkpoint,
        _pieces=pieces,
        _heads=heads,
    )


def _form(checkpoint: Checkpoint, pieces: Mapping[str, Piece]) -> str | None:
    """The form that some weights of a block are unpacked from."""
    packed = checkpoint.are_packed(piece.tensor for piece in pieces.values())
    return checkpoint.form.facts.packed if packed else None


def missing_fields(checkpoint: Checkpoint, block: CheckpointBlock) -> list[str]:
    """The fields that an import of a block must give, since the checkpoint does not tell them.

    Raises InvalidCheckpoint for a block that cannot be imported.
    """
    part = block.part or "self"
    pieces, _ = _as_stated(checkpoint, block, part)
    attention = _described(block, part, pieces)
    heads = [] if attention.heads is not None else ["num_heads"]
    return heads + [f"spec.{field}" for field in attention.unknown]


def _described(block: CheckpointBlock, part: Part, pieces: Mapping[str, Piece]) -> AttentionDescription:
    return described(block.family, _entries(block, part, pieces))


def _entries(block: CheckpointBlock, part: Part, pieces: Mapping[str, Piece]) -> Entries:
    return Entries(block.config, block.layer, part, block.stack, frozenset(pieces))


def _as_stated(checkpoint: Checkpoint, block: CheckpointBlock, part: Part) -> tuple[dict[str, Piece], list[str]]:
    """The pieces of a block without biases that config.json denies, and the names of those.

    Transformers ignores them as well.

    Raises InvalidCheckpoint where it asks for a bias that is not there, which transformers would begin at random.
    """
    pieces = _pieces(block, checkpoint)
    check_quantization(block, checkpoint)
    rule = BIASES.get(block.family.name)
    if rule is None or block.config.get("model_type") is None:  # nothing tells which class wrote it
        return pieces, []
    roles = rule(_entries(block, part, pieces))
    biases = [f"{role}_proj.bias" for role in roles if role != "d"]
    biases += [f"{role}_down.bias" for role in ("q", "kv") if "d" in roles and f"{role}_down.weight" in pieces]
    missing = [name for name in biases if name not in pieces]
    if missing:
        names = [block.tensor(block.names.pieces[name][0].tensor) for name in missing]
        raise InvalidCheckpoint(
            f"config.json asks for biases that the checkpoint lacks: {', '.join(dict.fromkeys(names))}",
            param="checkpoint",
            missing=list(dict.fromkeys(names)),
        )
    denied = {name for name in pieces if name.endswith(("_proj.bias", "_down.bias"))}.difference(biases)
    ignored = sorted({pieces[name].tensor for name in denied})
    return {name: piece for name, piece in pieces.items() if name not in denied}, ignored


def default_name(label: str, layer: int, part: Part = "self", stack: str | None = None) -> str:
    """A module's name from that of its checkpoint, what a name may not hold replaced.

    ``minilm.0``; of a stack that the request names ``t5.decoder.0``, and for cross-attention ``t5.decoder.0.cross``.
    """
    ending = (f".{stack}" if stack else "") + f".{layer}" + (".cross" if part == "cross" else "")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).lstrip("._-") or "checkpoint"
    return stem[: 128 - len(ending)] + ending


# ── what it computes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _overlaid(attention: AttentionDescription, request: ImportModule) -> AttentionSpec:
    """The spec of the checkpoint, with the request's fields in place of its own.

    Raises InvalidRequest where a field that neither of them says would change the numbers.
    """
    given = request.spec.model_fields_set if request.spec is not None else set()
    missing = [field for field in attention.unknown if field not in given]
    if missing:
        example = ", ".join(f'"{field}": {"[]" if field == "masks" else "false"}' for field in missing)
        raise InvalidRequest(
            f"the checkpoint does not state {' and '.join(missing)} of the attention, and each changes the numbers; "
            f'state it in spec, as in "spec": {{{example}}}',
            param=f"spec.{missing[0]}",
            missing=[f"spec.{field}" for field in missing],
        )
    if request.spec is None:
        return attention.spec
    spec = attention.spec.model_copy(update={field: getattr(request.spec, field) for field in given})
    check_spec(spec, "spec")
    return spec


def _counted(attention: AttentionDescription, request: ImportModule) -> AttentionDescription:
    """The attention with the number of its heads, which the checkpoint, the request or both say."""
    config_heads = attention.heads if isinstance(attention.heads, int) and attention.heads > 0 else None
    heads = config_heads if request.num_heads is None else request.num_heads
    if heads is None:
        raise InvalidRequest(
            "neither the request nor a config.json states the number of heads; send num_heads",
            param="num_heads",
        )
    if config_heads is not None and heads != config_heads:
        raise InvalidRequest(
            f"num_heads is {heads}, but config.json says {config_heads}; leave it out, or correct it",
            param="num_heads",
            expected=config_heads,
            actual=heads,
        )
    return replace(attention, heads=heads)


# ── its tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _pieces(block: CheckpointBlock, checkpoint: Checkpoint) -> dict[str, Piece]:
    """The tensors, by their full names, that hold each parameter."""
    for tensor, meaning in block.names.unsupported.items():
        if block.tensor(tensor) in checkpoint.tensors:
            raise InvalidCheckpoint(
                f"{block.tensor(tensor)} is {meaning}, which is not supported", param="checkpoint", tensor=tensor
            )
    pieces: dict[str, Piece] = {}
    missing = []
    for parameter, places in block.names.pieces.items():
        full = [replace(piece, tensor=block.tensor(piece.tensor, piece.layer)) for piece in places]
        piece = next((piece for piece in full if piece.tensor in checkpoint.tensors), None)
        if piece is not None:
            pieces[parameter] = piece
        elif parameter in _WEIGHTS:
            missing.append(" or ".join(piece.tensor for piece in full))
    missing += [block.tensor(other) for one, other in _COMPANIONS if one in pieces and other not in pieces]
    if missing:
        raise InvalidCheckpoint(f"the checkpoint lacks {', '.join(missing)}", param="checkpoint", missing=missing)
    return pieces


def _config(
    pieces: Mapping[str, Piece],
    attention: AttentionDescription,
    spec: AttentionSpec,
    checkpoint: Checkpoint,
    request: ImportModule,
) -> tuple[HeadSizes, ModuleConfig]:
    """The heads and the complete config that the shapes amount to. Shapes as in the table of parameters of a module."""
    headers = {parameter: checkpoint.header(piece.tensor) for parameter, piece in pieces.items()}
    dtypes = sorted({header.dtype for header in headers.values()})
    if _form(checkpoint, pieces) is not None:
        dtypes = ["float32"]
    if len(dtypes) > 1:
        odd = next(
            pieces[name].tensor for name, header in headers.items() if header.dtype != headers["q_proj.weight"].dtype
        )
        raise InvalidCheckpoint(
            f"the layer's tensors differ in dtype: {', '.join(dtypes)}; the first other is {odd}", param="checkpoint"
        )
    count = attention.heads or 1
    width = attention.head_dim or 1
    latent = attention.latent
    shared = 0 if latent is None else latent.shared
    heads = HeadSizes(count, attention.kv_heads or count, width, attention.value_dim or width, shared)
    shapes = {}
    for parameter, piece in pieces.items():
        stored = headers[parameter].shape
        try:
            shape = tuple(piece.cut(torch.empty(stored, device="meta"), heads).shape)
        except (RuntimeError, IndexError, TypeError, OverflowError):
            shape = ()
        if (parameter.endswith(("_proj.weight", "_down.weight")) and len(shape) != 2) or not shape or 0 in shape:
            raise InvalidCheckpoint(
                f"{piece.tensor} has shape {list(stored)}, which no {parameter} has", param="checkpoint"
            )
        shapes[parameter] = shape
    read = {role: shapes.get(f"{down}_down.weight", shapes[f"{role}_proj.weight"])[1] for role, down in _DOWNS.items()}
    q_rows, k_rows, v_rows = (shapes[f"{role}_proj.weight"][0] for role in "qkv")
    head_dim = q_rows // count
    kv_heads = k_rows // max(head_dim - shared, 1)
    if q_rows % count or k_rows % max(head_dim - shared, 1) or not kv_heads or v_rows % kv_heads or count % kv_heads:
        error = InvalidCheckpoint if request.num_heads is None else InvalidRequest
        source = " (config.json)" if request.num_heads is None else ""
        raise error(
            f"{count} heads do not divide the layer's projections of {q_rows} (query), {k_rows} (key) and {v_rows} "
            f"(value) rows{source}",
            param="checkpoint" if request.num_heads is None else "num_heads",
            num_heads=count,
            rows=[q_rows, k_rows, v_rows],
        )
    if (attention.kv_heads or kv_heads, attention.head_dim or head_dim) != (kv_heads, head_dim):
        raise InvalidCheckpoint(
            f"config.json says {attention.kv_heads or kv_heads} key/value heads of width "
            f"{attention.head_dim or head_dim}, and the layer's tensors have {kv_heads} of width {head_dim}",
            param="checkpoint",
        )
    try:
        config = complete(
            ModuleConfig.model_validate(
                {
                    "d_model": read["q"],
                    "num_heads": count,
                    "num_kv_heads": kv_heads,
                    "head_dim": head_dim,
                    "value_dim": v_rows // kv_heads,
                    "key_width": read["k"],
                    "value_width": read["v"],
                    "bias": biases_in(pieces),
                    "latent": latent,
                    "dtype": dtypes[0],
                    "spec": spec,
                }
            )
        )
        check_shapes(config, _needed(shapes, config, attention.spec))
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
    except InvalidRequest as fault:
        if request.spec is not None:
            raise InvalidRequest.at("spec", f"it does not fit the checkpoint: {fault.detail}") from None
        raise InvalidCheckpoint(
            f"the layer's tensors are not those of its config.json: {fault.detail}", param="checkpoint", **fault.facts
        ) from None
    return heads, config


def _needed(
    shapes: Mapping[str, tuple[int, ...]], config: ModuleConfig, own: AttentionSpec
) -> dict[str, tuple[int, ...]]:
    """The shapes without those that only the checkpoint's own spec asks for, and not the one laid over it."""
    theirs = parameter_shapes(Sizes.of(config.model_copy(update={"spec": own})))
    dropped = theirs.keys() - parameter_shapes(Sizes.of(config))
    return {name: shape for name, shape in shapes.items() if name not in dropped}
