"""A package with a trained model inside its wheel, installed in an environment that it shares with no other."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from benchmarks.peers.environments import Environment


@dataclass(frozen=True)
class Line:
    """A number as the package gives it, and as it comes from the server."""

    name: str
    theirs: float
    ours: float
    bound: float
    """The largest difference between the two."""

    @property
    def difference(self) -> float:
        """The absolute difference."""
        return abs(self.theirs - self.ours)

    @property
    def holds(self) -> bool:
        """True if the difference is within its bound; NaN is not."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class Package:
    """A wheel of the package index, and the packages that it needs."""

    requirement: str
    """With its version, as in ``antiberty==0.1.3``."""
    needs: tuple[str, ...]
    """Installed beside torch and numpy. The requirements of the wheel itself are not read: some have no wheel."""

    @property
    def environment(self) -> Environment:
        """Its environment."""
        return Environment(f"reproduced-{self.requirement.partition('==')[0]}", self.needs)

    def install(self) -> None:
        """Install it, unless it is installed."""
        self.environment.install()
        command = [self.environment.python, "-m", "pip", "install", "--quiet", "--no-deps", self.requirement]
        subprocess.run(command, check=True)

    def run(self, code: str, given: Any) -> Any:
        """Run code in the environment. ``given`` is JSON on its standard input, its last line of output is returned."""
        command = [self.environment.python, "-W", "ignore", "-c", code]
        done = subprocess.run(
            command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True, cwd=self.environment.folder
        )
        return json.loads(done.stdout.splitlines()[-1])


def convert(source: Path, folder: Path, architecture: str) -> None:
    """Write a checkpoint of pickled tensors as one that the server opens.

    The server opens no pickled file. ``weights_only`` makes torch refuse a file that holds anything but tensors.
    """
    folder.mkdir()
    tensors = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8")) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def vocabulary(file: Path) -> dict[str, int]:
    """Return the id of each token of a ``vocab.txt``."""
    return {token: number for number, token in enumerate(file.read_text("utf-8").split())}


def log_probabilities(logits: Any) -> NDArray[np.float64]:
    """Return log p of each token, in float64, of logits ``[..., V]``."""
    exact = np.asarray(logits, np.float64)
    return exact - np.logaddexp.reduce(exact, axis=-1, keepdims=True)
