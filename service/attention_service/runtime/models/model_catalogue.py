"""The checkpoints of the model repository that can become models, by their configs and the sizes of their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import attention_service
from attention_contract.errors import AttentionError, InvalidCheckpoint, InvalidRequest, ModelExists, ModelNotFound
from attention_contract.schemas.models import ModelInfo, default_model_name
from attention_service.modules.checkpoints.catalogue import paths
from attention_service.modules.checkpoints.checkpoint_files import open_checkpoint
from attention_service.runtime.device.freed_memory import MUCH

PROCESS_BYTES: Final = 448 * 2**20 + MUCH
"""Memory of a process that has imported torch and transformers, and what it may keep of freed memory."""
TINY: Final = "tiny"
"""The name of the model that ships with the server."""
_PACKAGE: Final = Path(attention_service.__file__).parent
_SHIPPED: Final = "tiny_model"
"""Its folder in the package."""
_WIDTHS: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MISSING: Final = (
    "the other layers of whole models run by transformers, which this server lacks; install its extra "
    "(attention-service[transformers])"
)

Input = Literal["text", "messages", "images", "target"]
_READERS: Final[dict[Input, tuple[str, ...]]] = {
    "text": (
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json",
    ),
    "images": ("preprocessor_config.json", "processor_config.json"),
}  # fmt: skip
"""Files of which a tokenizer, or an image processor, of transformers has one."""
_TEMPLATES: Final = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
"""Files and a folder of which a tokenizer with a chat template of its own has one."""
_LARGEST: Final = 2**22
"""Bytes of a tokenizer's config that is looked into."""
_GENERATING: Final = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MarianMTModel", "EncoderDecoderModel",
    "BertGenerationDecoder",
)  # fmt: skip
"""Ends of the class names of models that predict the next token."""
_PAIR: Final = frozenset({"text_config", "vision_config"})
_IMAGE_TOKENS: Final = frozenset({"image_token_id", "image_token_index"})
"""Names of the token that stands for an image in a text, in configs of models that read both."""


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint that can become a model."""

    checkpoint: str
    """Its path inside the repository."""
    folder: Path
    config: dict[str, Any]
    created: int
    """Seconds since 1970 at which its newest file was written."""
    file_bytes: int
    """Bytes of its tensors."""
    stored: str
    """The dtype of its tensors."""

    @property
    def name(self) -> str:
        """The name that a model of it has by default."""
        return default_model_name(self.checkpoint)

    def resident_bytes(self, dtype: str | None) -> int:
        """Estimate the memory of the process once the model is loaded."""
        return PROCESS_BYTES + self.file_bytes * _WIDTHS[dtype or "float32"] // _WIDTHS[self.stored]

    def loading_bytes(self, dtype: str | None) -> int:
        """Estimate the memory of the process while it loads: the file is mapped beside what was made of it."""
        return self.resident_bytes(dtype) + self.file_bytes

    def info(self, name: str, dtype: str | None) -> ModelInfo:
        """Describe the model before it is loaded."""
        kind = self.config.get("model_type")
        return ModelInfo(
            id=name,
            created=self.created,
            checkpoint=self.checkpoint,
            state="idle",
            architecture=self._class,
            model_type=kind[:80] if isinstance(kind, str) else None,
            takes=self.takes,
            generates=self._generates,
            bytes=self.resident_bytes(dtype),
            problem=None if has_transformers() else _MISSING,
        )

    @property
    def _class(self) -> str | None:
        """The name of its class in transformers."""
        named = self.config.get("architectures")
        return str(named[0])[:120] if isinstance(named, list) and named else None

    @property
    def _generates(self) -> bool:
        return self._class is not None and self._class.endswith(_GENERATING)

    @cached_property
    def takes(self) -> list[Input]:
        """The inputs that its requests may have, by the names of its files and by its config."""
        found: list[Input] = [takes for takes, names in _READERS.items() if _has(self.folder, *names)]
        # Of an encoder of texts beside one of images, such as CLIP, the half that reads images is loaded.
        pair = self.config.keys() >= _PAIR and _IMAGE_TOKENS.isdisjoint(self.config) and not self._generates
        if "images" in found and pair:
            return ["images"]
        if "text" in found and (_has(self.folder, *_TEMPLATES) or self._says_template()):
            found.append("messages")
        return [*found, "target"] if "text" in found and self.config.get("is_encoder_decoder") is True else found

    def _says_template(self) -> bool:
        """True if the tokenizer's own config has a template, as those of older checkpoints do."""
        file = self.folder / "tokenizer_config.json"
        return file.is_file() and file.stat().st_size <= _LARGEST and b'"chat_template"' in file.read_bytes()


def has_tokenizer(folder: Path) -> bool:
    """Return True if a checkpoint has a file of a tokenizer, whether it can be read or not."""
    return _has(folder, *_READERS["text"])


def _has(folder: Path, *names: str) -> bool:
    return any((folder / name).exists() for name in names)


def find_folder(root: Path, checkpoint: str) -> ModelFolder:
    """The checkpoint at a path of the repository, or the one that ships. Raises what ``open_checkpoint`` does."""
    place = checkpoint
    if checkpoint == TINY and not (root / TINY).exists() and (_PACKAGE / _SHIPPED).is_dir():
        root, place = _PACKAGE, _SHIPPED
    opened = open_checkpoint(root, place)
    folder = (root / place).resolve()
    if not opened.config or not folder.is_dir():
        has = "an empty config.json" if (folder / "config.json").is_file() else "no config.json"
        raise InvalidCheckpoint.at("checkpoint", f"{checkpoint} has {has}, which is needed to build the model")
    files = [file.stat() for file in {*opened.names.values()}]
    told = opened.config.get("dtype") or opened.config.get("torch_dtype")
    return ModelFolder(
        checkpoint=checkpoint,
        folder=folder,
        config=dict(opened.config),
        created=int(max(file.st_mtime for file in files)),
        file_bytes=sum(file.st_size for file in files),
        stored=told if told in _WIDTHS else "float32",
    )


def find_name(root: Path, name: str) -> ModelFolder:
    """The checkpoint whose path, or whose default name, is this.

    Raises ModelNotFound, ModelExists and InvalidCheckpoint.
    """
    known = _paths(root)
    found = name if name in known else next((path for path in known if default_model_name(path) == name), None)
    if found is None:
        raise ModelNotFound(
            f"there is no model {name[:128]!r}, and the model repository holds no checkpoint of this name; "
            "GET /v1/models lists them",
            param="model",
        )
    check_own_name(root, found, "model")
    return find_folder(root, found)


def check_own_name(root: Path, checkpoint: str, param: str) -> None:
    """Raise ModelExists for a checkpoint whose default name is another's too; the path ``a--b`` goes before ``a/b``."""
    if (shared := _shared_name(checkpoint.strip("/"), _paths(root))) is not None:
        raise ModelExists.at(param, shared)


def _shared_name(checkpoint: str, known: Sequence[str]) -> str | None:
    name = default_model_name(checkpoint)
    others = [path for path in known if path != checkpoint and default_model_name(path) == name]
    if checkpoint == name or not others:
        return None
    return (
        f"the checkpoints {checkpoint} and {others[0]} have the same default name {name}; "
        f"load {checkpoint} with a name of its own (POST /v1/models with name)"
    )


def _paths(root: Path) -> list[str]:
    """The path of every checkpoint with a config.json, that of the model that ships first."""
    found = [path for path in paths(root) if path != TINY and (root / path / "config.json").is_file()]
    return [TINY, *found] if (root / TINY).is_dir() or (_PACKAGE / _SHIPPED).is_dir() else found


def has_transformers() -> bool:
    """Return True if transformers is installed."""
    return find_spec("transformers") is not None


def check_transformers() -> None:
    """Raise InvalidCheckpoint unless transformers is installed."""
    if not has_transformers():
        raise InvalidCheckpoint.at("checkpoint", f"{_MISSING}")


def check_divisible(device_map: str) -> None:
    """Raise InvalidRequest unless this server can divide a model so."""
    if device_map == "balanced":
        raise InvalidRequest.at(
            "device_map",
            "balanced divides a model over several devices, but a model uses one device here; auto keeps "
            "on disk the layers that do not fit into memory",
        )
    if find_spec("accelerate") is None:
        raise InvalidRequest.at(
            "device_map",
            "transformers needs accelerate to divide a model, which this server lacks; install its extra "
            "(attention-service[offload])",
        )


def listed(root: Path) -> list[ModelInfo]:
    """Describe every checkpoint with a config.json, by path; those at fault with their problem."""
    found, known = [], _paths(root)
    for path in known:
        try:
            if (shared := _shared_name(path, known)) is not None:
                found.append(_faulty(path, path, shared))
                continue
            folder = find_folder(root, path)
            found.append(folder.info(folder.name, None))
        except AttentionError as fault:
            found.append(_faulty(default_model_name(path), path, fault.detail))
    return found


def _faulty(name: str, path: str, problem: str) -> ModelInfo:
    return ModelInfo(id=name, created=0, checkpoint=path, state="idle", problem=problem)
