"""API keys and the file that keeps their hashes, ``<models_dir>/keys.json``.

A key is 256 random bits, so that one SHA-256 is enough: a salt and a slow hash protect passwords that can be guessed,
and nobody guesses 256 bits. The key itself is shown once, when it is made.
"""

import hmac
import ipaddress
import re
import secrets
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from attention_contract.operations import ANY_KEY, KeyScope, Scopes
from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.audit import note
from attention_service.modules.store_files import locked_folder, replace_file
from attention_service.runtime.callers import UNLIMITED, Caller
from attention_service.settings import Settings

log = structlog.get_logger(__name__)
FILE: Final = "keys.json"
PREFIX: Final = "attn_"
"""Begins every key, so that scanners for secrets find one that leaks."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
STARTED_WITH: Final = "start"
"""The caller who holds the key whose hash the server was started with."""
_LOOK_S: Final = 0.5
"""Seconds between two looks at the file."""


class KeyEntry(BaseModel):
    """One key in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    scopes: list[KeyScope]
    sha256: str
    """The hash of the key, in hexadecimal."""
    created: datetime
    limits: CallerLimits = UNLIMITED
    """Limits in place of those of the settings."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_name(name)

    @field_validator("sha256")
    @classmethod
    def _check_hash(cls, text: str) -> str:
        if len(bytes.fromhex(text)) != sha256().digest_size:
            raise ValueError("expected 64 hexadecimal digits")
        return text


class KeyList(BaseModel):
    """The file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: list[KeyEntry] = []


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key that the server knows."""

    digest: bytes
    caller: Caller
    scopes: Scopes


def check_name(name: str) -> str:
    """Return the name of a key. Raises ValueError for one that is not fit, or that reads as an address."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("expected up to 64 letters, digits, - and _, beginning with a letter or digit")
    with suppress(ValueError):
        ipaddress.ip_address(name)
        raise ValueError("expected a name that is not an address")
    return name


def read_keys(root: Path) -> list[KeyEntry]:
    """The keys of a model repository. Raises OSError, and ValueError for a file that is no list of keys."""
    try:
        return KeyList.model_validate_json((root / FILE).read_bytes()).keys
    except FileNotFoundError:
        return []


def divided(limits: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The share of one of several processes in these limits; of a whole number, no less than 1.

    Recordings lie in the store, where each process counts those of all.
    """
    shares = {
        name: -(-limit // replicas) if isinstance(limit, int) else limit / replicas for name, limit in limits.items()
    }
    return shares | {name: limits[name] for name in limits.keys() & {"recordings_bytes"}}


def limits_of(settings: Settings) -> CallerLimits:
    """The limits of every caller that has none of its own."""
    stated = {name: getattr(settings, f"caller_{name}") for name in CallerLimits.model_fields}
    return CallerLimits(**stated) if any(limit is not None for limit in stated.values()) else UNLIMITED


def shares_of(settings: Settings, budget: int) -> CallerLimits:
    """Half of what all requests and sessions may have: what one of several keys may take, so that it pushes out nobody.

    budget: the memory budget in bytes.
    """
    return CallerLimits(
        concurrent=max(settings.max_queue // 2, 1),
        sessions=settings.max_sessions // 2,
        session_bytes=int(settings.session_share * budget) // 2,
    )


def create_key(root: Path, name: str, scopes: Sequence[KeyScope], limits: CallerLimits = UNLIMITED) -> str:
    """Make a key, keep its hash and return it. Raises ValueError for a name that is taken or not fit."""
    key = PREFIX + secrets.token_urlsafe(32)
    with locked_folder(root):
        keys = read_keys(root)
        if any(known_key.name == name for known_key in keys):
            raise ValueError(f"there is a key named {name!r}; revoke it first, or take another name")
        entry = KeyEntry(
            name=check_name(name),
            scopes=sorted(set(scopes)),
            sha256=sha256(key.encode()).hexdigest(),
            created=datetime.now(UTC).replace(microsecond=0),
            limits=limits,
        )
        _write(root, [*keys, entry])
    return key


def revoke_key(root: Path, name: str) -> None:
    """Remove a key. Raises ValueError if there is none of this name."""
    with locked_folder(root):
        keys = read_keys(root)
        kept = [key for key in keys if key.name != name]
        if len(kept) == len(keys):
            raise ValueError(f"there is no key named {name!r}; the keys are {', '.join(key.name for key in keys)}")
        _write(root, kept)


def _write(root: Path, keys: Sequence[KeyEntry]) -> None:
    """Replace the file, which only its owner can read, or leave it as it was."""
    text = KeyList(keys=list(keys)).model_dump_json(indent=2, exclude_none=True) + "\n"
    replace_file(root / FILE, [text.encode()], mode=0o600)


class KeyRing:
    """The keys of a running server, read again when the file changes."""

    def __init__(self, root: Path, limits: CallerLimits = UNLIMITED, replicas: int = 1, key_hash: str = "") -> None:
        """``limits``: those of every key, but for what a key says of its own; that is divided by ``replicas``.

        ``key_hash``: the hash of a key that is not in the file, in hexadecimal.
        """
        self._root = root
        caller = Caller(STARTED_WITH, True, limits)
        self._given = [HeldKey(bytes.fromhex(key_hash), caller, ANY_KEY)] if key_hash else []
        self._limits = limits
        self._replicas = replicas
        self._shares = CallerLimits()
        self._keys: list[HeldKey] = []
        self._seen: tuple[int, int, int] | None = None
        self._next_look = 0.0
        self._refresh(first=True)

    def share(self, shares: CallerLimits) -> None:
        """Set limits of each key where there are several, but for what the settings and a key say of their own."""
        self._shares = shares
        self._refresh(first=True)

    def find(self, key: bytes) -> HeldKey | None:
        """The known key that equals this one, in a time that does not depend on it."""
        self._look()
        digest, equal_key = sha256(key).digest(), None
        for held_key in self._keys:
            if hmac.compare_digest(held_key.digest, digest):
                equal_key = held_key
        return equal_key

    def holds(self, key: HeldKey) -> bool:
        """Return True unless the key was revoked since, or has other scopes."""
        self._look()
        return key in self._keys

    def _look(self) -> None:
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _LOOK_S
            self._refresh()

    def _refresh(self, *, first: bool = False) -> None:
        """Read the file if it changed. One that cannot be read lets nobody in."""
        path = self._root / FILE
        try:
            facts = path.stat()
        except OSError:
            seen = None
        else:
            seen = facts.st_ino, facts.st_size, facts.st_mtime_ns
            if seen != self._seen and stat.S_IMODE(facts.st_mode) & 0o077:
                log.warning("others can read or write the file of keys; chmod 600", path=str(path))
        if seen == self._seen and not first:
            return
        self._seen = seen
        before = {key.caller.name for key in self._keys}
        try:
            entries = read_keys(self._root)
            shares = self._shares.model_dump(exclude_none=True) if len(entries) > 1 else {}
            limits = self._limits
            if shares:
                limits = limits.model_copy(update=shares | limits.model_dump(exclude_none=True))
            self._keys = [*self._given, *(_held(entry, limits, self._replicas) for entry in entries)]
        except (OSError, ValidationError) as fault:
            self._keys = [*self._given]
            log.error("the file of keys cannot be read; its keys are refused", path=str(path), reason=_reason(fault))
        after = {key.caller.name for key in self._keys}
        if not first:
            note("operator", "keys", added=sorted(after - before), removed=sorted(before - after))


def _held(entry: KeyEntry, limits: CallerLimits, replicas: int) -> HeldKey:
    own = divided(entry.limits.model_dump(exclude_none=True), replicas)
    caller = Caller(entry.name, "manage" in entry.scopes, limits.model_copy(update=own) if own else limits)
    return HeldKey(bytes.fromhex(entry.sha256), caller, frozenset(entry.scopes))


def _reason(fault: OSError | ValidationError) -> str:
    if isinstance(fault, OSError):
        return fault.strerror or type(fault).__name__
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in fault.errors()[:4])
