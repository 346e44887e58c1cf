"""Measure how well cheap measures find the sentences that an answer needs: against really leaving each one out.

The texts are those that the client ships. The last sentence of each is the answer, and those before it are its sources.
The answer's loss without a source is the reference (leave-one-out: Cohen-Wang et al. 2024, section 2).

Needs a running service (``attention serve``, or ATTENTION_URL): ``python examples/context_agreement.py``
"""

import numpy as np

from attention_client import Client
from attention_client.survey.head_survey import shipped_texts

MODEL, TEXTS, LEAST = "tiny", 40, 4
"""The model, the number of texts, and the fewest sentences of one."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the place of each value in ascending order."""
    return values.argsort().argsort()


def agreement(found: np.ndarray, reference: np.ndarray) -> tuple[float, bool]:
    """Return Spearman's correlation of two scores of sources, and True if both have the same first one."""
    correlation = np.corrcoef(ranks(found), ranks(reference))[0, 1]
    return float(correlation), bool(found.argmax() == reference.argmax())


def main() -> None:
    texts = [text for text in shipped_texts() if text.count(". ") >= LEAST - 1][:TEXTS]
    agreements: dict[str, list[tuple[float, bool]]] = {"hidden": [], "attention": [], "gradient": []}
    with Client() as client:
        for text in texts:
            prompt, _, last = text.rstrip().rpartition(". ")
            reply = client.models.context(
                MODEL, f"{prompt}.", answer=f" {last}", return_=["attention", "gradient", "hidden", "removed"], heads=0
            )
            reference = -reply.ablation.removed.sum(1)
            scores = {
                "hidden": -reply.ablation.hidden.sum(1), "attention": reply.attention.mean(1),
                "gradient": reply.gradient.sum(1),
            }  # fmt: skip
            for name, found in scores.items():
                agreements[name].append(agreement(found, reference))
    print(f"{len(texts)} texts, against leaving each source out")
    print("measure    rank correlation  same first source")
    for name, rows in agreements.items():
        correlations, firsts = zip(*rows, strict=True)
        print(f"{name:<10} {np.mean(correlations):>16.2f}  {np.mean(firsts):>17.0%}")


if __name__ == "__main__":
    main()
