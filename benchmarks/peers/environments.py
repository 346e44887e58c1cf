"""An environment for each peer, apart from the project's own: made once, and again when what it holds changes."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, ServerError

CACHE = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Environment:
    """Packages that are installed together, beside numpy and the torch that the project pins."""

    name: str
    packages: tuple[str, ...]
    base: str = sys.executable
    """The Python that it is made with."""

    @property
    def folder(self) -> Path:
        """Its folder."""
        return CACHE / self.name

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def site(self) -> Path:
        """Its site-packages folder."""
        return next((self.folder / "lib").glob("python3.*")) / "site-packages"

    def install(self) -> None:
        """Make it, unless it is there already. Raises ServerError with the installer's own last words."""
        wanted = "\n".join([self.base, _torch(), *self.packages])
        stamp = self.folder / "installed"
        if not stamp.exists() or stamp.read_text() != wanted:
            self._make()
            stamp.write_text(wanted)
        # Where a server imports the attention from, also one that keeps PYTHONPATH from its workers.
        (self.site / "benchmarks.pth").write_text(str(ROOT))

    def _make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        log = CACHE / f"{self.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            for command in self._commands():
                if subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode:
                    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
                    raise ServerError(f"could not be installed: {' / '.join(last)}")

    def _commands(self) -> Iterator[list[str]]:
        if shutil.which("uv"):
            yield ["uv", "venv", "--seed", "--python", self.base, str(self.folder)]
        else:
            # Debian's Python has no pip of its own to put there.
            yield [self.base, "-m", "venv", "--without-pip", str(self.folder)]
            yield [sys.executable, "-m", "pip", "--python", self.python, "install", "pip"]
        yield ["sh", str(ROOT / "deploy" / "install_torch.sh"), self.python]
        yield [self.python, "-m", "pip", "install", _torch(), "numpy", *self.packages]


def _torch() -> str:
    """The torch that the project pins."""
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in constraints if line.startswith("torch=="))
