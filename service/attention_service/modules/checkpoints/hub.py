"""Fetch checkpoints from the Hugging Face hub into the model repository: safetensors files and configs, no code.

The hub says first which files there are, how large they are and what their hashes are. A checkpoint that is too large
is refused before a byte of it is fetched.
"""

import fcntl
import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Final

from attention_contract.errors import (
    AttentionError,
    CheckpointNotFound,
    InternalError,
    InvalidCheckpoint,
    InvalidRequest,
    StoreFull,
    Unavailable,
)
from attention_contract.schemas.server import SuggestedModel
from attention_service.modules.checkpoints.checkpoint_files import OWN_FOLDERS, check_fetched
from attention_service.modules.store_files import locked, locked_folder, make_folder, reason, refusal, sync

PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Tensors, configs, templates and tokenizers. Pickled weights and Python files are not fetched."""
SUGGESTED: Final = (
    SuggestedModel(
        repository="sentence-transformers/all-MiniLM-L6-v2", revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        bytes=90_868_376, license="Apache-2.0", about="a sentence encoder: 6 layers of 12 heads",
    ),
    SuggestedModel(
        repository="openai-community/gpt2", revision="607a30d783dfa663caf39e06633721c8d4cfcd7e",
        bytes=548_105_171, license="MIT", about="GPT-2, which generates: 12 layers of 12 heads",
    ),
    SuggestedModel(
        repository="HuggingFaceTB/SmolLM2-135M", revision="93efa2f097d58c2a74874c7e644dbc9b0cee75a2",
        bytes=269_060_552, license="Apache-2.0", about="a small Llama, which generates: 30 layers of 9 heads",
    ),
)  # fmt: skip
"""Small models that the page offers, each at one commit."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_STAGED: Final = ".fetch-"
_CHUNK: Final = 2**20
"""Bytes after which a download notes its progress, and stops if nobody wants it any more."""
_LACKING: Final = "fetching from the hub needs huggingface_hub: pip install 'attention-service[hub]'"


class FetchStoppedError(Exception):
    """The fetch was stopped, and nothing of it is left."""


@dataclass(eq=False)
class Progress:
    """The state of a fetch. Its own thread writes it, others read it."""

    revision: str | None = None
    """The commit, once the hub has told it."""
    bytes: int = 0
    total_bytes: int | None = None
    files: int = 0
    """Files that are complete."""
    total_files: int | None = None
    stopped: bool = False
    """Set by whoever wants it to stop."""
    on_change: Callable[["Progress"], object] = lambda _: None

    def add(self, count: int) -> None:
        """Count bytes that came. Raises FetchStoppedError if the fetch is to stop."""
        self.bytes += count
        if self.stopped:
            raise FetchStoppedError
        self.on_change(self)


class DiskClaims:
    """The bytes that the fetches of one process have still to write, so that they fit onto its disk together.

    Each fetch is a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._fetching: list[Progress] = []

    @contextmanager
    def held(self, progress: Progress, check: Callable[[int], None]) -> Iterator[None]:
        """Count what a fetch has still to write until the block ends, if it may begin.

        ``check`` raises if it may not, for the bytes that the others have still to write.
        """
        with self._lock:
            check(sum((other.total_bytes or 0) - other.bytes for other in self._fetching))
            self._fetching.append(progress)
        try:
            yield
        finally:
            with self._lock:
                self._fetching.remove(progress)


def unreachable(*, allowed: bool) -> str | None:
    """The reason why callers may not have the server fetch, and the way to change that; None if they may."""
    if not allowed:
        return "this server fetches nothing from the hub; its operator allows it by ATTENTION_HUB=true (--hub)"
    return None if find_spec("huggingface_hub") else _LACKING


def fetch(
    root: Path,
    repository: str,
    revision: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    claims: DiskClaims | None = None,
) -> Path:
    """Fetch a repository of the hub, unless its folder ``org/name`` exists already, and return that folder.

    The folder appears when it is complete and every file has the hash that the hub states. ``limit`` is the largest sum
    of bytes, and ``claims`` those of the other fetches of this process. Raises InvalidRequest without huggingface_hub
    or for a name that no repository has, CheckpointNotFound if the hub has none or does not show it, InvalidCheckpoint
    if it has no safetensors file, names other files as such, or sends other bytes than it lists, StoreFull if it is too
    large, Unavailable if the hub cannot be reached, and FetchStoppedError.
    """
    if _REPOSITORY.fullmatch(repository) is None or repository.partition("/")[0] in OWN_FOLDERS:
        raise InvalidRequest.at(
            "repository",
            "expected the name of a repository, as in openai-community/gpt2, of any owner but "
            f"{', '.join(OWN_FOLDERS)}; got {repository[:128]!r}",
        )
    folder = root / repository
    if folder.is_dir():
        return folder
    staged = root / f"{_STAGED}{secrets.token_hex(8)}"
    try:
        with locked_folder(staged):  # `clean` of another process leaves it alone
            _download(repository, revision, staged, limit, progress or Progress(), claims or DiskClaims())
            shutil.rmtree(staged / ".cache", ignore_errors=True)  # the hub's notes on what is downloaded
            check_fetched(root, staged)
            make_folder(folder.parent)
            staged.rename(folder)
        sync(folder.parent)
    except OSError as fault:
        if not folder.is_dir():  # another fetch may have been faster
            raise refusal(fault, repository) from fault
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder


def clean(root: Path) -> None:
    """Remove what fetches have left whose process was killed."""
    for staged in root.glob(f"{_STAGED}*"):
        try:
            with locked(staged, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(staged, ignore_errors=True)
        except OSError:  # another process is fetching it
            continue


def _download(
    repository: str, revision: str | None, folder: Path, limit: int | None, progress: Progress, claims: DiskClaims
) -> None:
    """Download the files of a repository into a folder, and wait until they are on the disk."""
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra
        from huggingface_hub import constants  # noqa: PLC0415
    except ImportError:
        raise InvalidRequest(_LACKING, param="repository") from None
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK
    constants.HF_HUB_DISABLE_XET = True  # its downloads cannot be stopped from Python
    with _faults_of_hub(repository, revision):
        repository_info = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = [
        file for file in repository_info.siblings or [] if any(fnmatch(file.rfilename, wanted) for wanted in PATTERNS)
    ]
    for name in (file.rfilename for file in files):
        if Path(name).is_absolute() or not {".", "..", ""}.isdisjoint(name.split("/")) or "\0" in name:
            raise InvalidCheckpoint(
                f"the hub lists the file {name[:128]!r} in {repository}; expected a path inside the repository",
                param="repository",
            )
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise InvalidCheckpoint(
            f"{repository} has no safetensors file; other formats are not read: convert it", param="repository"
        )
    progress.revision, progress.total_files = repository_info.sha, len(files)
    progress.total_bytes = need = sum(file.size or 0 for file in files)
    with claims.held(progress, partial(_check_size, repository, need, limit, folder)):
        for file in files:
            before = progress.bytes
            progress.add(0)
            with _faults_of_hub(repository, revision):
                huggingface_hub.hf_hub_download(
                    repository, file.rfilename, revision=repository_info.sha, local_dir=folder,
                    tqdm_class=_bar(progress, before + (file.size or 0), file.rfilename),
                )  # fmt: skip
            progress.add(before + (file.size or 0) - progress.bytes)
            _check_hash(repository, folder / file.rfilename, file)
            sync(folder / file.rfilename)
            progress.files += 1
    progress.add(0)


def _bar(progress: Progress, most: int, name: str) -> Any:
    """A class of progress bars for the hub's client, which draws none. ``most``: the bytes after the file ``name``.

    Its ``update`` raises InvalidCheckpoint as soon as more come, before they are written.
    """

    class Bar:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            if count and progress.bytes + count > most:
                raise InvalidCheckpoint(
                    f"the hub sends more of {name} than the bytes that it lists; fetch it again later, or from "
                    "another address (HF_ENDPOINT)",
                    param="repository",
                )
            progress.add(int(count or 0))

    return Bar


def _check_size(repository: str, need: int, limit: int | None, folder: Path, others: int) -> None:
    """Raise StoreFull if the limit or the disk does not allow so many bytes; ``others``: those that fetches take."""
    free = shutil.disk_usage(folder).free - others
    beside = f" beside the {others} that other fetches will take" if others else ""
    for most, whose in ((limit, "hub_limit allows {} bytes"), (free, f"the disk has {{}} bytes left{beside}")):
        if most is not None and need > most:
            raise StoreFull(
                f"{repository} takes {need} bytes; {whose.format(most)}", param="repository", limit=most, actual=need
            )


def _check_hash(repository: str, path: Path, listed: Any) -> None:
    """Raise InvalidCheckpoint unless a file has the hash of the hub's list: SHA-256, of a small file git's SHA-1."""
    with path.open("rb") as file:
        if listed.lfs is not None:
            digest, expected = hashlib.file_digest(file, "sha256"), listed.lfs.sha256
        else:
            digest, expected = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False), listed.blob_id
            digest.update(file.read())
    if digest.hexdigest() != expected:
        raise InvalidCheckpoint(
            f"{listed.rfilename} of {repository} came damaged: its hash is not the one that the hub states; fetch it "
            "again",
            param="repository",
        )


@contextmanager
def _faults_of_hub(repository: str, revision: str | None) -> Iterator[None]:
    """Raise the errors of the contract for those of the hub's client, which are of several libraries."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except (FetchStoppedError, AttentionError):
        raise
    except errors.HFValidationError as fault:
        raise InvalidRequest.at("repository", f"no repository has such a name: {reason(fault)}") from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as fault:
        at = f" at revision {revision!r}" if isinstance(fault, errors.RevisionNotFoundError) else ""
        raise CheckpointNotFound(
            f"the hub shows no repository {repository!r}{at}; check the name, or give access by HF_TOKEN",
            param="repository",
        ) from None
    except Exception as fault:
        refused = refusal(fault, repository) if isinstance(fault, OSError) else None
        if refused is not None and not isinstance(refused, InternalError):
            raise refused from fault
        raise Unavailable(
            f"the hub cannot be reached for {repository!r}: {reason(fault)}; if this machine is offline, copy the "
            "checkpoint's folder into the model repository",
            param="repository",
        ) from fault
