"""Find the heads that link given pairs of tokens, over many texts.

Two questions to every head of ``tiny``. Which head looks from the token before a repeated name to that name's first
mention, so that it knows what to say? And which looks from a repeated name back to the first mention? For each head
the share of its weight at the pairs, and how often that key is the first among all names of the text.

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/heads_that_link.py``
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import plotting
from attention_client import Client
from attention_client.survey.head_survey import HeadSurvey

NAMES = ["Anna", "Clara", "Emma", "Grace", "Kate", "Mary", "Ben", "David", "Henry", "Jack", "John", "Tom"]
TEXTS = [
    f"When {one} and {other} went to the {place}, {one} gave a book to {other}."
    for place in ("garden", "house", "park", "school")
    for one, other in pairwise(NAMES)
]
Pairs = list[list[list[int]]]
"""Positions of a query and a key, for each text."""


def linked(client: Client) -> tuple[Pairs, Pairs, list[list[int]]]:
    """Return pairs from before a repeated name and from the name to its first mention, and the places of names."""
    before, itself, places = [], [], []
    read = client.models.forward("tiny", TEXTS, top_k=0)
    for number in range(len(TEXTS)):
        words = [token.strip() for token in read.labels_of(number).tokens]
        at_names = [at for at, word in enumerate(words) if word in NAMES]
        again = [(at, words.index(words[at])) for at in at_names if words.index(words[at]) < at]
        before.append([[at - 1, first] for at, first in again])
        itself.append([[at, first] for at, first in again])
        places.append(sorted({first for _, first in again}))
    return before, itself, places


def measured(client: Client, pairs: Pairs, candidates: list[list[int]]) -> HeadSurvey:
    """Return how much each head looks at the pairs of each text."""
    options = {"pairs": pairs, "candidates": candidates}
    return client.models.survey("tiny", TEXTS, statistics=["pairs"], statistic_options=options)


def main() -> None:
    folder = plotting.output_folder(__doc__)
    with Client() as client:
        before, itself, places = linked(client)
        found = {
            "from before a repeated name": measured(client, before, places),
            "from a repeated name": measured(client, itself, places),
        }
    figure, panels = plt.subplots(2, 1, figsize=(8, 4), sharex=True, sharey=True)
    for panel, (asked, survey) in zip(panels, found.items(), strict=True):
        names = [str(head) for head in survey.heads]
        share, first = survey.means("pairs.share"), survey.means("pairs.first")
        best = np.argsort(-share)[:3]
        print(f"{asked}: " + ", ".join(f"{names[at]} {share[at]:.2f} (first {first[at]:.2f})" for at in best))
        panel.bar(np.arange(len(names)) - 0.2, share, 0.4, label="share of the weight")
        panel.bar(np.arange(len(names)) + 0.2, first, 0.4, label="first of the names", color="0.7")
        panel.set_title(asked)
        panel.set_xticks(range(len(names)), names, rotation=60)
    panels[0].legend()
    plotting.save(figure, folder, "heads_that_link")


if __name__ == "__main__":
    main()
