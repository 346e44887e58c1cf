"""Models and tokenizers of transformers from checkpoints on this machine. Nothing is downloaded or unpickled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_contract.errors import CheckpointNotFound

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(checkpoint: str, models_dir: Path | None = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model without its head, and its tokenizer.

    ``checkpoint`` is a folder, a folder inside the model repository ``models_dir`` (by default that of a server of this
    user), or a name in the local cache of transformers. Raises CheckpointNotFound where one of the two cannot be
    loaded, and ImportError without the extra ``transformers``.
    """
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415 - imports torch
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    logging: Any = transformers_logging  # its functions have no annotations
    place = checkpoint
    repository = _repository(models_dir)
    if not Path(checkpoint).is_dir() and (repository / checkpoint).is_dir():
        place = str(repository / checkpoint)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a checkpoint with a head, whose parameters stay unused, is no reason for a report
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        model = AutoModel.from_pretrained(place, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError) as fault:
        reason = str(fault).strip().partition("\n")[0]
        raise CheckpointNotFound(
            f"no model and tokenizer of transformers can be loaded from {checkpoint!r}: {reason}; expected a folder "
            f"with config.json, a tokenizer and safetensors files, here or in {repository} (ATTENTION_MODELS_DIR)",
            param="checkpoint",
        ) from fault
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity(level)
    return model, tokenizer


def is_folder(checkpoint: str, models_dir: Path | None = None) -> bool:
    """True for a folder here or inside the model repository."""
    try:
        return Path(checkpoint).is_dir() or (_repository(models_dir) / checkpoint).is_dir()
    except ImportError:  # the extra is not installed, and the repository is not named
        return False


def path_in_repository(checkpoint: str, models_dir: Path | None = None) -> str:
    """The path by which a server knows a checkpoint that ``load_model`` finds: that inside the model repository.

    A name of another place stays as it is.
    """
    folder, repository = Path(checkpoint).resolve(), _repository(models_dir).resolve()
    inside = folder.is_dir() and folder != repository and folder.is_relative_to(repository)
    return folder.relative_to(repository).as_posix() if inside else checkpoint


def _repository(models_dir: Path | None) -> Path:
    """The model repository; by default that of a server of this user."""
    from platformdirs import user_data_path  # noqa: PLC0415 - of the extra, as transformers

    return models_dir or user_data_path("attention-service", appauthor=False)
