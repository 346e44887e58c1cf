"""Fetch checkpoints from the Hugging Face hub into the model repository: safetensors files and configs, no code."""

import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from attention_contract.errors import CheckpointNotFound, InvalidCheckpoint, InvalidRequest, Unavailable
from attention_service.modules.checkpoints.checkpoint_files import OWN_FOLDERS
from attention_service.modules.faults import reason

PATTERNS: Final = ("*.safetensors", "*.json", "*.txt", "tokenizer.model")
"""Tensors, configs and tokenizers. Pickled weights and Python files are not fetched."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_STAGED: Final = ".fetch-"


def fetch(root: Path, repository: str, revision: str | None = None) -> Path:
    """Fetch a repository of the hub, unless its folder ``org/name`` exists already, and return that folder.

    The folder appears when it is complete. Raises InvalidRequest without huggingface_hub or for a name that no
    repository has, CheckpointNotFound if the hub has none or does not show it, InvalidCheckpoint if it has no
    safetensors file, and Unavailable if the hub cannot be reached.
    """
    if _REPOSITORY.fullmatch(repository) is None or repository.partition("/")[0] in OWN_FOLDERS:
        raise InvalidRequest.at(
            "repository",
            "expected the name of a repository, as in openai-community/gpt2, of any owner but "
            f"{' and '.join(OWN_FOLDERS)}; got {repository[:128]!r}",
        )
    folder = root / repository
    if folder.is_dir():
        return folder
    staged = root / f"{_STAGED}{secrets.token_hex(8)}"
    try:
        _download(repository, revision, staged)
        shutil.rmtree(staged / ".cache", ignore_errors=True)  # the hub's notes on what is downloaded
        if not any(staged.glob("**/*.safetensors")):
            raise InvalidCheckpoint(
                f"{repository} has no safetensors file; other formats are not read: convert it", param="repository"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged.rename(folder)
    except OSError as fault:
        if not folder.is_dir():  # another fetch may have been faster
            raise Unavailable(f"{repository} could not be kept: {reason(fault)}", param="repository") from fault
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder


def _download(repository: str, revision: str | None, folder: Path) -> None:
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra
        from huggingface_hub import errors  # noqa: PLC0415
    except ImportError:
        raise InvalidRequest(
            "fetching from the hub needs huggingface_hub: pip install 'attention-service[hub]'", param="repository"
        ) from None
    try:
        huggingface_hub.snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=list(PATTERNS)
        )
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as fault:
        at = f" at revision {revision!r}" if isinstance(fault, errors.RevisionNotFoundError) else ""
        raise CheckpointNotFound(
            f"the hub shows no repository {repository!r}{at}; check the name, or give access by HF_TOKEN",
            param="repository",
        ) from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, OSError) as fault:
        raise Unavailable(
            f"the hub cannot be reached for {repository!r}: {reason(fault)}; if this machine is offline, copy the "
            "checkpoint's folder into the model repository",
            param="repository",
        ) from fault
