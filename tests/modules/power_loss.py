"""A disk that loses power: it records what the store does, and rebuilds every state that a crash may leave.

A folder remembers the changes of its entries until it is synced, a file its content. A crash keeps the first few of the
changes of each folder since its last sync. Of a file that was not synced it keeps all of the content, half or nothing.
Journals of file systems promise more.
"""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class File:
    """A file, with the content that the last sync put on the disk."""

    content: bytes = b""
    durable: bytes | None = None


@dataclass(eq=False)
class Folder:
    """A folder, with the entries that the last sync put on the disk and the changes since."""

    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    durable: "dict[str, File | Folder]" = field(default_factory=dict)
    pending: "list[dict[str, File | Folder]]" = field(default_factory=list)
    """The entries after each change that is not synced."""

    def change(self, **changes: "File | Folder | None") -> None:
        """Change entries at once; None removes one."""
        for name, entry in changes.items():
            if entry is None:
                del self.entries[name]
            else:
                self.entries[name] = entry
        self.pending.append(dict(self.entries))

    def sync(self) -> None:
        """Put the entries on the disk."""
        self.durable, self.pending = dict(self.entries), []


class Disk:
    """A recorder of the operations of the store under a folder. ``after`` is called after each of them."""

    def __init__(self, root: Path, monkeypatch, store_module, store_files) -> None:
        self.root, self.top = root, Folder()
        self.after = lambda: None
        recorded = [
            (os, "replace", self._replaced), (os, "fsync", self._synced), (Path, "mkdir", self._made),
            (Path, "unlink", self._unlinked), (Path, "write_text", self._written),
            (store_module, "save_file", lambda _, path, **__: self._written(path)),
            (shutil, "rmtree", None),
        ]  # fmt: skip
        for owner, name, record in recorded:
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, self._removing if record is None else self._recording(real, record))
        self._rmdir, self._unlink = os.rmdir, os.unlink

    def _recording(self, real, record):
        def done(*args, **options):
            result = real(*args, **options)
            record(*args, **options)
            self.after()
            return result

        return done

    def _inside(self, path) -> bool:
        return Path(path).is_relative_to(self.root)

    def _at(self, path) -> "File | Folder":
        found: File | Folder = self.top
        for part in Path(path).relative_to(self.root).parts:
            found = found.entries[part]
        return found

    def _made(self, path, *_, **__) -> None:
        for each in reversed((path, *path.parents)):
            if self._inside(each) and each != self.root and each.name not in self._at(each.parent).entries:
                self._at(each.parent).change(**{each.name: Folder()})

    def _written(self, path, *_, **__) -> None:
        found = self._at(path.parent).entries.get(path.name)
        if found is None:
            found = File()
            self._at(path.parent).change(**{path.name: found})
        found.content = path.read_bytes()

    def _replaced(self, source, target) -> None:
        moved, folders = self._at(source), (self._at(Path(source).parent), self._at(Path(target).parent))
        if folders[0] is folders[1]:
            folders[0].change(**{Path(source).name: None, Path(target).name: moved})
            return
        folders[1].change(**{Path(target).name: moved})
        folders[0].change(**{Path(source).name: None})

    def _unlinked(self, path, *_, **__) -> None:
        self._at(path.parent).change(**{path.name: None})

    def _synced(self, descriptor) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self._inside(path):
            return
        found = self._at(path)
        if isinstance(found, Folder):
            found.sync()
        else:
            found.durable = found.content

    def _removing(self, path, **_) -> None:
        if not path.exists():
            return
        for each in sorted(path.rglob("*"), reverse=True):
            self._unlink(each)
            self._unlinked(each)
            self.after()
        self._rmdir(path)
        self._unlinked(path)
        self.after()

    def crashes(self, count: int, seed: int) -> Iterator["Folder"]:
        """States that a crash may leave now: all lost that is not synced, nothing lost, and others drawn at random."""
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            choose = {0: lambda n: 0, 1: lambda n: n}.get(number, lambda n, rng=rng: rng.randint(0, n))
            yield _crashed(self.top, choose)


def _crashed(folder: Folder, choose) -> Folder:
    states = [folder.durable, *folder.pending]
    kept = states[choose(len(states) - 1)]
    left = Folder()
    for name, entry in kept.items():
        if isinstance(entry, Folder):
            left.entries[name] = _crashed(entry, choose)
        elif entry.durable is not None:
            left.entries[name] = File(entry.durable)
        else:
            left.entries[name] = File(entry.content[: len(entry.content) * choose(2) // 2])
    return left


def materialize(folder: Folder, path: Path) -> None:
    """Write a state that a crash left to a real disk."""
    path.mkdir(parents=True)
    for name, entry in folder.entries.items():
        if isinstance(entry, Folder):
            materialize(entry, path / name)
        else:
            (path / name).write_bytes(entry.content)
