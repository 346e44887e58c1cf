"""Files of a checkpoint's folder that its model does not read, for the list of models."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from attention_service.models.folders.tokenizer_files import TEXT_FILES, VOCABULARIES, Vocabulary
from attention_service.modules.checkpoints.adapter_files import ADAPTER_TENSORS

_WEIGHTS: Final = frozenset({
    ".bin", ".ckpt", ".h5", ".mlmodel", ".msgpack", ".npz", ".onnx", ".ot", ".pkl", ".pt", ".pth", ".tflite",
})  # fmt: skip
"""Endings of files with tensors in other formats."""
_SAFETENSORS: Final = ".safetensors"
_CODE: Final = ".py"
_BESIDE_GGUF: Final = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", *TEXT_FILES,
)  # fmt: skip
"""Files of a checkpoint, whose like a GGUF file brings itself."""
_MAX_LISTED: Final = 100


def unread_files(folder: Path, read: Collection[Path], vocabulary: Vocabulary | None = None) -> list[str]:
    """The files of tensors, code or tokenizers in a folder that are not read, each with the reason.

    ``vocabulary``: that of the folder, if its files of tokenizers are to be told.
    """
    unread = []
    for file in sorted(folder.iterdir()):
        if file.suffix == _CODE:
            unread.append(f"{file.name} (no code of a checkpoint is run)")
        elif vocabulary is not None and (why := _unread_text(file.name, vocabulary)) is not None:
            unread.append(f"{file.name} ({why})")
        elif file.suffix in _WEIGHTS:
            unread.append(f"{file.name} (another format, which is not read)")
        elif file.suffix == _SAFETENSORS and file.name != ADAPTER_TENSORS and file.resolve() not in read:
            unread.append(f"{file.name} (transformers reads other files of the folder)")
    return unread[:_MAX_LISTED]


def _unread_text(name: str, vocabulary: Vocabulary) -> str | None:
    """The reason for which a file of a tokenizer is not read; None for one that is, and for any other file."""
    if vocabulary.missing is not None:
        return vocabulary.missing if name in TEXT_FILES else None
    if name not in VOCABULARIES or name in vocabulary.files:
        return None
    return f"the vocabulary is {'read from ' + ' and '.join(vocabulary.files) if vocabulary.files else 'built in'}"


def unread_beside(folder: Path) -> list[str]:
    """The files of a checkpoint beside GGUF files, unless they are another checkpoint's; each with the reason."""
    if any(folder.glob(f"*{_SAFETENSORS}")):
        return []
    beside = [name for name in _BESIDE_GGUF if (folder / name).is_file()]
    own = [f"{name} (beside a GGUF file, which is read alone)" for name in beside]
    others = [file for file in unread_files(folder, ()) if file.partition(" ")[0] not in beside]
    return [*own, *others][:_MAX_LISTED]
