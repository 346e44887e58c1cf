"""The attention blocks of a checkpoint, found by the names of its tensors, and the one that a request means."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.modules import ImportModule, Stack
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint
from attention_service.modules.checkpoints.families import FAMILIES, INEXACT
from attention_service.modules.checkpoints.family import BlockNames, Family, Part
from attention_service.modules.checkpoints.forms.quantized.quantized_tensors import form_of, quantization_of

_NAMES_IN_MESSAGE: Final = 20
_STACKS: Final[Mapping[str, Stack]] = {
    "encoder": "encoder",
    "decoder": "decoder",
    "text": "text",
    "text_model": "text",
    "language_model": "text",
    "vision": "vision",
    "vision_model": "vision",
    "vision_tower": "vision",
    "visual": "vision",
    "audio_tower": "audio",
    "audio_model": "audio",
}
"""Words of a path that tell a stack."""
_SPARED: Final = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
"""Entries of a quantization_config that name modules which stay as they are."""
_SECTIONS: Final[Mapping[str, Stack]] = {
    "encoder": "encoder",
    "decoder": "decoder",
    "text_config": "text",
    "vision_config": "vision",
    "audio_config": "audio",
}
"""Entries of config.json that hold the config of one stack."""


@dataclass(frozen=True)
class CheckpointBlock:
    """One attention block of a checkpoint."""

    family: Family
    names: BlockNames
    path: str
    """The text before the prefix of its names."""
    layer: int
    part: Part | None
    """None if the names do not say, as for a module that stands alone."""
    stack: Stack | None
    config: Mapping[str, Any]
    """The entries of config.json that are about it."""

    def tensor(self, name: str, layer: int | None = None) -> str:
        """The full name of a tensor of the block, or of its like in another layer."""
        number = self.layer if layer is None else layer
        return self.path + self.names.prefix.replace("{layer}", str(number)) + name

    @property
    def prefix(self) -> str:
        """The text before the names of its tensors."""
        return self.tensor("")


def blocks_of(checkpoint: Checkpoint) -> list[CheckpointBlock]:
    """Return every attention block with the tensor names of a known family, layer by layer.

    Raises InvalidCheckpoint where the tensors have the names of a family, but config.json states another model_type.
    """
    checkpoint.check_layers()
    block_by_prefix: dict[str, CheckpointBlock] = {}
    strangers: set[str] = set()
    for stack, config in _sections(checkpoint.config):
        model_type = _model_type(config)
        families = [family for family in FAMILIES.values() if model_type in family.model_types]
        loose = [family for family in FAMILIES.values() if family.without_config]
        known = families or [family for family in loose if model_type is None or not family.model_types]
        blocks = {block.prefix: block for family in known for block in _named(family, checkpoint, config)}
        block_by_prefix |= {
            prefix: block
            for prefix, block in blocks.items()
            if (stack is None or block.stack in {stack, None})
            and prefix not in block_by_prefix
            and (families or model_type is None or _has_queries(block, checkpoint))
        }
        if model_type is not None and not families:
            strangers.add(model_type[:80])
    if not block_by_prefix and strangers:
        reasons = "".join(f"; {INEXACT[kind]}, which no spec states" for kind in sorted(strangers) if kind in INEXACT)
        raise InvalidCheckpoint(
            f"config.json says model_type {' and '.join(map(repr, sorted(strangers)))}, which is not known"
            f"{reasons}; docs/checkpoints.md lists the {len(_model_types())} known ones",
            param="checkpoint",
        )
    return sorted(block_by_prefix.values(), key=lambda block: (block.layer, block.prefix))


def check_quantization(block: CheckpointBlock, checkpoint: Checkpoint) -> None:
    """Raise InvalidCheckpoint if a block is quantized in a form that is not unpacked here.

    transformers leaves the modules alone that the config names, as the attention of gpt-oss.
    """
    stated = quantization_of(block.config) or quantization_of(checkpoint.config)
    if stated is None or checkpoint.are_packed(checkpoint.tensors):  # what is not packed then is stored as it is
        return
    entries = stated if isinstance(stated, dict) else {}
    lists = [entries[name] for name in _SPARED if isinstance(entries.get(name), list)]
    spared = [name for names in lists for name in names if isinstance(name, str)]
    place = block.prefix.rstrip(".")
    if any(fnmatchcase(place, f"*{spared_name}*") for spared_name in spared):
        return
    form = form_of(entries)
    raise InvalidCheckpoint(
        f"config.json has a quantization_config ({str(entries.get('quant_method'))[:80]}), so the library that wrote "
        f"it computes with other numbers than the tensors{f': {form}' if isinstance(form, str) else ''}; import the "
        "model before quantization, or convert it as docs/checkpoints.md shows under Convert",
        param="checkpoint",
        entry="quantization_config",
    )


def _sections(config: Mapping[str, Any]) -> list[tuple[Stack | None, Mapping[str, Any]]]:
    """The parts of config.json that describe a model: one for each stack, or the whole."""
    whole = _model_type(config)
    if whole == "mistral" and "layer_types" in config:  # transformers takes its class for one with windows in some
        whole = "ministral"
        config = {**config, "model_type": whole}
    own: tuple[Stack | None, Mapping[str, Any]] = (None, config)
    parts: list[tuple[Stack | None, Mapping[str, Any]]] = [
        (stack, _typed(config[entry], stack, whole))
        for entry, stack in _SECTIONS.items()
        if isinstance(config.get(entry), dict)
    ]
    return [own] if not parts or whole in _model_types() else parts


def _typed(section: Mapping[str, Any], stack: Stack, whole: str | None) -> Mapping[str, Any]:
    """A section with a model_type: its own, or that of the stack in a model of type ``whole``.

    Transformers leaves it out of the sections of CLIP, whose stacks are ``clip_text_model`` and ``clip_vision_model``.
    """
    if whole is None or section.get("model_type") is not None:
        return section
    known = _model_types()
    kinds = (f"{whole}_{stack}_model", f"{whole}_{stack}")
    return {**section, "model_type": next((kind for kind in kinds if kind in known), whole)}


def _model_types() -> set[str]:
    """Every model_type of a family."""
    return {kind for family in FAMILIES.values() for kind in family.model_types}


def _has_queries(block: CheckpointBlock, checkpoint: Checkpoint) -> bool:
    """True if the checkpoint holds a query projection of the block, and not just other tensors of the same names."""
    return any(block.tensor(piece.tensor) in checkpoint.tensors for piece in block.names.pieces["q_proj.weight"])


def _model_type(config: Mapping[str, Any]) -> str | None:
    """The entry model_type; None where it is absent. Raises InvalidCheckpoint where it is no text."""
    value = config.get("model_type")
    if value is not None and not isinstance(value, str):
        raise InvalidCheckpoint(
            f"config.json says model_type {str(value)[:80]!r}; expected text", param="checkpoint", entry="model_type"
        )
    return value


def _named(family: Family, checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[CheckpointBlock]:
    """The blocks of a checkpoint with the names of a family; the first of its ``blocks`` wins."""
    taken: set[str] = set()
    for names in family.blocks:
        for name in checkpoint.tensors:
            tensor = next((tensor for tensor in names.tensors if name == tensor or name.endswith(f".{tensor}")), None)
            match = None if tensor is None else names.pattern.fullmatch(name.removesuffix(tensor))
            if match is None or match[0] in taken:
                continue
            taken.add(match[0])
            words = [_STACKS[word] for word in re.split(r"\.", match["path"]) if word in _STACKS]
            layer = int(match.groupdict().get("layer") or 0)
            kinds = [word for word in words if word not in {"encoder", "decoder"}] or words  # a text model's encoder
            stack = names.stack or (kinds[-1] if kinds else None)
            yield CheckpointBlock(family, names, match["path"], layer, names.part, stack, config)


def lack_of_blocks(checkpoint: Checkpoint) -> str:
    """Return the reason for which a checkpoint has no attention block."""
    first = min(checkpoint.tensors)
    named = f"none of its tensors, such as {first[:128]}, is of an attention layer"
    kinds = {kind for _, config in _sections(checkpoint.config) if (kind := _model_type(config)) is not None}
    if kinds:
        return f"{named} as models of type {' or '.join(repr(kind[:80]) for kind in sorted(kinds))} name them"
    return f"{named} of BERT or torch, and it has no config.json with a model_type, which any other family needs"


def choose(blocks: list[CheckpointBlock], request: ImportModule) -> CheckpointBlock:
    """Return the block that a request names.

    ``blocks``: at least one. Raises InvalidCheckpoint if no block or several match, InvalidRequest if ``stack`` would
    decide.
    """
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
        return replace(chosen[0], part=chosen[0].part or request.part)
    stacks = sorted({block.stack for block in chosen if block.stack is not None})
    if request.stack is None and len(stacks) > 1:
        raise InvalidRequest(
            f"the checkpoint has {request.part}-attention in layer {request.layer} of its {' and its '.join(stacks)}; "
            "choose one with stack",
            param="stack",
            stacks=stacks,
        )
    places = [block.prefix for block in chosen]
    raise InvalidCheckpoint(
        f"the checkpoint has {len(places)} such layers, at {', '.join(places[:_NAMES_IN_MESSAGE])}; "
        "save the one that you need as a separate checkpoint",
        param="checkpoint",
    )


def _ranges(layers: list[int]) -> str:
    """Layers in words: ``layers 0 to 11``, or a list where some are missing."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    more = " …" if len(layers) > _NAMES_IN_MESSAGE else ""
    return f"layers {', '.join(map(str, layers[:_NAMES_IN_MESSAGE]))}{more}"


def _parts(blocks: list[CheckpointBlock]) -> str:
    kinds = {f"{block.stack} {block.part}-attention" if block.stack else f"{block.part}-attention" for block in blocks}
    return " and ".join(sorted(kinds))
