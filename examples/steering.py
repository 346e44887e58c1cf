"""Fit a steering vector to two sides of texts, and see what it adds to a prediction, by layer and scale.

One side ends with "garden", the other with "school". The vector is added to the state behind one layer of ``tiny`` at
a time, in another sentence that ends before the place, with scales from −6 to 6: it moves the margin of " garden" over
" school" as the next word. A scale that is too large makes no word likely but one.

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/steering.py``
"""

import matplotlib.pyplot as plt
import numpy as np

import plotting
from attention_client import Client

TEXT = "Kate went to the"
NAMES = ["Ann", "Ben", "Jack", "Mary", "Tom", "Kate"]
SIDES = [[f"{name} went to the {place}" for name in NAMES] for place in ("garden", "school")]
SCALES = list(range(-6, 7))
MARGIN = {"token": " garden", "against": " school"}


def main() -> None:
    folder = plotting.output_folder(__doc__)
    with Client() as client:
        vector = client.vectors.fit("tiny", *SIDES)
        sweep = {"tap": "hidden", "over": ["layers", "scales"], "scales": SCALES, "add": {"vector": vector.id}}
        reply = client.models.effects("tiny", TEXT, sweep=sweep, of=MARGIN)
        layers, margins = reply.swept["layers"], reply.baseline + np.asarray(reply.effects.value)
        texts = {}
        for scale in (-3, 0, 3):
            steer = [{"vector": vector.id, "scale": scale, "layers": [3]}] if scale else []
            asked = {"steer": steer, "statistics": []}
            texts[scale] = client.models.generate("tiny", TEXT, max_tokens=6, temperature=0, attention=asked)
        client.vectors.delete(vector.id)
    for scale in (-3, 0, 3):
        at = SCALES.index(scale)
        told = ", ".join(f"{row[at]:.2f} after layer {layer}" for layer, row in zip(layers, margins, strict=True))
        print(f"margin at scale {scale}: {told}")
    for scale, text in texts.items():
        print(f"scale {scale}, after layer 3: {TEXT}{text.choices[0].text}")

    figure, panel = plt.subplots(figsize=(6, 3.2))
    for layer, row in zip(layers, margins, strict=True):
        panel.plot(SCALES, row, marker=".", label=f"after layer {layer}")
    panel.axhline(0, color="0.8", zorder=0)
    panel.set(title=f"{TEXT} … log p(garden) − log p(school)", xlabel="scale of the vector", ylabel="nats")
    panel.legend()
    plotting.save(figure, folder, "steering")


if __name__ == "__main__":
    main()
