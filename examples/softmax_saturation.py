"""Measure the effect of dividing scores by √d: without it, the softmax of wide heads saturates and loses its gradient.

If q and k have independent standard normal entries, q·k has variance d (Vaswani et al. 2017, footnote 4). The example
measures this variance at widths from 4 to 1024. For the plain and the scaled dot product it also measures the largest
weight, the entropy of the weights, and the norm of the gradient at the scores (the median over queries).

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/softmax_saturation.py``
"""

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

import plotting
from attention_client import Client

WIDTHS = [4, 16, 64, 256, 1024]
HEADS, QUERIES, KEYS = 8, 64, 128
SCORES = {"dot": "q·k", "scaled_dot": "q·k / √d"}


def measure(client: Client, score: str, width: int, rng: np.random.Generator) -> dict[str, float]:
    """Return statistics of one attention over random q, k and v, over all heads and queries."""
    q = rng.normal(size=(HEADS, QUERIES, width))
    k, v = rng.normal(size=(HEADS, KEYS, width)), rng.normal(size=(HEADS, KEYS, 1))
    spec = {"score": {"name": score}}
    looks = client.attention.weights(q, k, v, spec=spec, return_weights=False)
    changes = client.attention.gradients(
        q, k, v, spec=spec, wrt=["scores"], return_=["scores"], upstream=rng.choice([-1.0, 1.0], (HEADS, QUERIES, 1))
    )
    return {
        "variance": float(changes.scores.var()),
        "largest weight": float(looks.statistics.max_weight.mean()),
        "entropy": float(looks.statistics.entropy.mean()),
        "gradient": float(np.median(np.linalg.norm(changes.gradients["scores"], axis=-1))),
    }


def main() -> None:
    folder = plotting.output_folder(__doc__)
    with Client() as client:
        found = {
            score: [measure(client, score, width, np.random.default_rng(width)) for width in WIDTHS] for score in SCORES
        }

    def column(score: str, name: str) -> NDArray[np.float64]:
        return np.array([one[name] for one in found[score]])

    print("   d   variance of q·k   largest weight      entropy          ‖∂L/∂scores‖")
    print("                         plain   scaled    plain   scaled    plain   scaled")
    for at, width in enumerate(WIDTHS):
        pairs = (found[score][at][name] for name in ("largest weight", "entropy", "gradient") for score in SCORES)
        print(f"{width:4} {found['dot'][at]['variance']:13.2f}      " + "".join(f"{number:9.4f}" for number in pairs))
    variance = column("dot", "variance")
    print(f"largest deviation of the variance from d: {np.abs(variance / WIDTHS - 1).max():.1%}")
    left = column("dot", "gradient")[-1] / column("scaled_dot", "gradient")[-1]
    print(f"gradient left without the scale at d = {WIDTHS[-1]}: {left:.1%}")

    figure, (first, *others) = plt.subplots(1, 4, figsize=(10, 2.6))
    first.loglog(WIDTHS, variance, "o", label="measured")
    first.loglog(WIDTHS, WIDTHS, "-", color="gray", label="d")
    first.set(title="variance of q·k", xlabel="d")
    first.legend()
    titles = {
        "largest weight": "largest weight",
        "entropy": "entropy of the weights (nats)",
        "gradient": "‖∂L/∂scores‖ (median)",
    }
    for axis, (name, title) in zip(others, titles.items(), strict=True):
        for score, label in SCORES.items():
            axis.semilogx(WIDTHS, column(score, name), marker="o", label=label)
        axis.set(title=title, xlabel="d", ylim=(0, None))
    others[1].axhline(np.log(KEYS), color="gray", linestyle=":", label="all keys alike")
    others[1].set_ylim(0, 1.1 * np.log(KEYS))
    others[1].legend()
    plotting.save(figure, folder, "softmax_saturation")


if __name__ == "__main__":
    main()
