"""Check that the page in the repository was built from its sources.

::

    python -m tools.built_page

The hash of the sources in the build must be that of the sources. If npm and the tools' packages are there, or can be
installed, the sources are linted, typed and tested, and the page is built again and compared file by file.
"""

import filecmp
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "web"
BUILT = ROOT / "service/attention_service/web"
HASHED = ("src", "public", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "stamp.ts")
"""The list of ``web/stamp.ts``."""


def source_hash() -> str:
    """The hash that ``web/stamp.ts`` writes into the build: SHA-256 over the names and contents of all sources."""
    paths = [path for name in HASHED for path in (sorted((SOURCES / name).rglob("*")) or [SOURCES / name])]
    names = sorted(path.relative_to(SOURCES).as_posix() for path in paths if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256((SOURCES / name).read_bytes()).digest())
    return digest.hexdigest()


def differences(one: Path, other: Path) -> list[str]:
    """The names of files that two folders do not share with the same bytes."""
    names = {path.relative_to(folder).as_posix() for folder in (one, other) for path in folder.rglob("*")}
    names = {name for name in names if not (one / name).is_dir() and not (other / name).is_dir()}
    _, differing, missing = filecmp.cmpfiles(one, other, sorted(names), shallow=False)
    return sorted([*differing, *missing])


def _rebuilt(npm: str, folder: Path) -> bool:
    """Build the page into a folder. False if the tools cannot be installed here."""
    if not (SOURCES / "node_modules/.package-lock.json").exists():
        installed = subprocess.run([npm, "ci", "--ignore-scripts"], cwd=SOURCES, check=False, capture_output=True)
        if installed.returncode:
            return False
    subprocess.run([npm, "run", "--silent", "check"], cwd=SOURCES, check=True, timeout=240)
    command = [npm, "run", "--silent", "bundle", "--", "--outDir", str(folder), "--logLevel", "error"]
    subprocess.run(command, cwd=SOURCES, check=True, timeout=120)
    return True


def main() -> int:
    stamp = BUILT / "sources.txt"
    if not stamp.exists() or stamp.read_text("utf-8").strip() != source_hash():
        print("the page was not built from the present sources in web/: run `make web`", file=sys.stderr)
        return 1
    npm = shutil.which("npm")
    with TemporaryDirectory() as scratch:
        if npm is None or not _rebuilt(npm, Path(scratch, "web")):
            print("the page is of the present sources; it was not built again, without npm and its packages")
            return 0
        if found := differences(BUILT, Path(scratch, "web")):
            print(f"the page differs from a new build in {', '.join(found)}: run `make web`", file=sys.stderr)
            return 1
    print("the page is what its sources build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
