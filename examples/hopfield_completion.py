"""Complete corrupted letters by modern Hopfield retrieval, and show the mixtures at small β.

The stored patterns are 26 letters as images of ±1, without their mean and of equal norm. A third of the pixels of
each letter is flipped. At a large β, retrieval returns every letter. At smaller β the states stop at mixtures of
several letters, and at the smallest at the mean of all letters (Ramsauer et al. 2021, section 2: metastable states).

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/hopfield_completion.py``
"""

from string import ascii_uppercase
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import plotting
from attention_client import Client

SIDE = 20
FLIPPED = 1 / 3
BETAS = np.geomspace(0.1, 100, 31)
SHARP, BLUNT = 28, 18  # indices of the two β in the figure
SHOWN = [ascii_uppercase.index(letter) for letter in "AGKRW"]


def letter(character: str) -> NDArray[np.float64]:
    """Return the letter as ``[SIDE · SIDE]`` pixels: 1 for ink, −1 for paper."""
    image = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), character, 255, ImageFont.load_default(SIDE), anchor="mm")
    return np.where(np.asarray(image, np.float64).ravel() > 127, 1.0, -1.0)


def main() -> None:
    folder = plotting.output_folder(__doc__)
    rng = np.random.default_rng(0)
    letters = np.stack([letter(character) for character in ascii_uppercase])
    corrupted = np.where(rng.random(letters.shape) < FLIPPED, -letters, letters)
    mean = letters.mean(0)
    stored = letters - mean
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    states = corrupted - (1 - 2 * FLIPPED) * mean  # remove the mean that the flips leave
    states /= np.linalg.norm(states, axis=1, keepdims=True)

    with Client() as client:
        runs = [
            client.hopfield.retrieve(stored, states, beta=beta, eps=1e-6, max_steps=1000, return_association=True)
            for beta in BETAS
        ]
    images = [run.association @ letters for run in runs]  # the mixture of each state, in pixels
    right = [float((np.sign(image) == letters).mean()) for image in images]
    mixed = [float(run.reached.mixed.mean()) for run in runs]
    sharp = runs[SHARP]
    found = int((sharp.reached.pattern == np.arange(26)).sum())
    print(f"pixels right: {(corrupted == letters).mean():.3f} corrupted, {right[SHARP]:.3f} retrieved")
    print(f"letters right: {found} of 26, {int(sharp.reached.single.sum())} of them one pattern")
    print(f"steps: {sharp.steps.max()} at beta {BETAS[SHARP]:.3g}, {runs[BLUNT].steps.max()} at {BETAS[BLUNT]:.3g}")
    print(f"largest rise of an energy: {max(np.diff(run.energy).max() for run in runs):.1e}")
    print(f"mixtures: {mixed[0]:.2f} letters at beta {BETAS[0]:.3g}, {mixed[SHARP]:.2f} at {BETAS[SHARP]:.3g}")

    panels: list[Any] = [
        [f"{row}{column}" for column in range(5)] + ["mixed" if row < 2 else "energy"] * 5 for row in range(4)
    ]
    figure, axes = plt.subplot_mosaic(panels, figsize=(9, 3.7))
    rows = {
        "stored": letters,
        "corrupted": corrupted,
        f"β = {BETAS[SHARP]:.0f}": images[SHARP],
        f"β = {BETAS[BLUNT]:.1f}": images[BLUNT],
    }
    for row, (name, pictures) in enumerate(rows.items()):
        for column, index in enumerate(SHOWN):
            axis = axes[f"{row}{column}"]
            axis.imshow(pictures[index].reshape(SIDE, SIDE), vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        axes[f"{row}0"].set_ylabel(name, rotation=0, ha="right", va="center")
    axes["mixed"].semilogx(BETAS, mixed, label="letters in a mixture (mean)")
    axes["mixed"].semilogx(BETAS, 26 * np.array(right), label="26 · share of pixels right")
    axes["mixed"].set(xlabel="β", title="from the mean of all to one pattern")
    axes["mixed"].legend()
    for at in (SHARP, BLUNT):
        axes["energy"].plot(runs[at].energy.mean(0), marker=".", label=f"β = {BETAS[at]:.1f}")
    axes["energy"].set(xlabel="step", title="energy (mean), never rising", xlim=(-0.2, 8.2))
    axes["energy"].legend()
    plotting.save(figure, folder, "hopfield_completion")


if __name__ == "__main__":
    main()
