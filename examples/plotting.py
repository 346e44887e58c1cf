"""File and style of the examples' figures."""

import argparse
import io
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # write files without a display
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

HERE = Path(__file__).parent / "figures"
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 80,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "image.cmap": "gray_r",
}


def output_folder(description: str | None) -> Path:
    """Return the folder of ``--output``, and create it if it is missing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the figure; default: %(default)s")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(STYLE)
    return folder


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as a PNG with few colours, to keep the file small."""
    path, drawn = folder / f"{name}.png", io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    print(f"figure: {path}")
