"""Fit a probe that says when a name is about to be repeated, and end texts at that name.

Each token of some sentences is labelled by whether the next one is a name that was read before. A linear probe of the
states of ``tiny`` tells the two kinds apart; so does one number of one head, the weight of L1H0 at names. The probe
then watches generations with names that it has not seen, and ends them at the first name that is repeated.

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/stop_at_a_name.py``
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

import plotting
from attention_client import Client

NAMES = ["Anna", "Clara", "Emma", "Grace", "Kate", "Mary", "Ben", "David", "Henry", "Jack", "John", "Tom"]
PLACES = "garden", "house", "park", "school"
TEXTS = [
    f"When {one} and {other} went to the {place}, {one} gave a book to {other}."
    for place in PLACES
    for one, other in pairwise(NAMES)
]
PROMPTS = "When Leo and Rosa went to the town", "Leo went to the river. Vera went to the town. Then"
ABOVE = 0.0


def labelled(client: Client, text: str) -> tuple[list[int], NDArray[np.float64]]:
    """Return for each token whether a name is repeated next, and the weight of L1H0 at names."""
    reply = client.models.weights("tiny", text, layers=[1], select={"heads": [0]})
    words = [token.strip() for token in reply.labels_of(0).tokens]
    repeats = [int(word in words[:at] and word in NAMES) for at, word in enumerate(words)]
    looks = np.asarray(reply.layers[0].weights).reshape(len(words), -1)[:, np.isin(words, NAMES)].sum(1)
    return [*repeats[1:], 0], looks


def area(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve of two sets of scores."""
    return float((positive[:, None] > negative).mean())


def main() -> None:
    folder = plotting.output_folder(__doc__)
    with Client() as client:
        rows = [labelled(client, text) for text in TEXTS]
        labels = [own for own, _ in rows]
        probe = client.models.fit_probe("tiny", {"point": "hidden", "layer": "all"}, TEXTS, labels, positions="all")
        said, looks = np.concatenate(labels) == 1, np.concatenate([looks for _, looks in rows])
        print("AUC of the states:", ", ".join(f"{layer.auc:.3f} after layer {layer.layer}" for layer in probe.layers))
        print(f"AUC of L1H0's weight at names: {area(looks[said], looks[~said]):.3f}")
        whole, stopped = [], []
        for prompt in PROMPTS:
            for found, stop in ((whole, None), (stopped, {"above": ABOVE})):
                watch = [{"probe": probe.id, "stop": stop}]
                asked = {"watch": watch, "top_k": 0, "statistics": []}
                reply = client.models.generate("tiny", prompt, max_tokens=12, temperature=0, attention=asked)
                found.append(reply.choices[0])
            print(f"{stopped[-1].finish_reason}: {prompt} |{stopped[-1].text}")
        client.models.delete_probe(probe.id)

    figure, panels = plt.subplots(1, len(PROMPTS), figsize=(9, 3), sharey=True)
    for panel, choice, ended in zip(panels, whole, stopped, strict=True):
        scores = [token.scores[probe.id] for token in choice.attention]
        panel.bar(range(len(scores)), scores, color=["C1" if score > ABOVE else "C0" for score in scores])
        panel.axvline(len(ended.attention) - 1, color="0.6", linestyle=":")
        panel.set_xticks(range(len(scores)), [token.token.strip() for token in choice.attention], rotation=60)
        panel.set(title="…" + choice.text[:24] + "…")
    panels[0].set_ylabel("score of the state before")
    plotting.save(figure, folder, "stop_at_a_name")


if __name__ == "__main__":
    main()
