"""Train additive attention to spell words backwards, with the service's gradients.

An encoder state is a letter and its position, both one-hot. A decoder state is the position to write. The score vᵀ
tanh(W₁ q + W₂ k) (Bahdanau et al. 2015) must learn to look from position t at letter L − 1 − t, so the alignment
matrix becomes anti-diagonal. The values are the letters. The output is therefore a distribution over letters, and its
cross-entropy is the loss. The service computes output and gradients; numpy takes the Adam steps (Kingma & Ba 2015).

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/alignment.py``
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

import plotting
from attention_client import Client

Array = NDArray[np.float64]
LETTERS, LENGTH, HIDDEN, BATCH, HELD_OUT = 26, 10, 24, 16, 200
STEPS, RATE = 60, 0.05
SHOWN = [0, 8, STEPS]
SPEC: dict[str, Any] = {"score": {"name": "additive", "hidden": HIDDEN}}
WIDTH = LETTERS + LENGTH


def words(rng: np.random.Generator, count: int) -> tuple[Array, Array, Array, Array]:
    """Draw random words: query and key ``[B, 1, L, W]``, value and letters to write ``[B, 1, L, letters]``."""
    letters = np.eye(LETTERS)[rng.integers(LETTERS, size=(count, LENGTH))]
    positions = np.broadcast_to(np.eye(LENGTH), (count, LENGTH, LENGTH))
    key = np.concatenate([letters, positions], axis=-1)
    query = np.concatenate([np.zeros_like(letters), positions], axis=-1)
    return query[:, None], key[:, None], letters[:, None], letters[:, None, ::-1]


def initial(rng: np.random.Generator) -> dict[str, Array]:
    """Draw small random parameters of the score."""
    shapes = {"query_weight": (1, HIDDEN, WIDTH), "key_weight": (1, HIDDEN, WIDTH), "v": (1, HIDDEN)}
    return {f"score.{name}": 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}


def slopes(client: Client, parameters: dict[str, Array], batch: tuple[Array, ...]) -> tuple[float, dict[str, Array]]:
    """Return the cross-entropy of a batch per letter, in nats, and its gradients."""
    query, key, value, target = batch
    options: dict[str, Any] = {"spec": SPEC, "parameters": parameters}
    written = np.maximum(client.attention.forward(query, key, value, **options).output, 1e-9)
    count = target.sum()
    loss = -float((target * np.log(written)).sum() / count)
    upstream = -target / written / count
    reply = client.attention.gradients(query, key, value, upstream=upstream, wrt=list(parameters), **options)
    return loss, reply.gradients


def adam(parameters: dict[str, Array], gradients: dict[str, Array], memory: dict[str, Any], step: int) -> None:
    """Take one step of Adam, in place."""
    for name, gradient in gradients.items():
        mean, square = memory.setdefault(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        parameters[name] -= RATE * mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)


def look(client: Client, parameters: dict[str, Array], batch: tuple[Array, ...]) -> tuple[float, Array]:
    """Return the share of correct letters, and the mean alignment ``[position to write, position read]``."""
    query, key, value, target = batch
    reply = client.attention.forward(query, key, value, spec=SPEC, parameters=parameters, return_=["output", "weights"])
    return float((reply.output.argmax(-1) == target.argmax(-1)).mean()), reply.weights.mean((0, 1))


def main() -> None:
    folder = plotting.output_folder(__doc__)
    rng = np.random.default_rng(0)
    parameters, memory = initial(rng), {}
    held_out = words(rng, HELD_OUT)
    losses, seen = [], {}
    with Client() as client:
        for step in range(STEPS + 1):
            if step in SHOWN:
                seen[step] = look(client, parameters, held_out)
            if step < STEPS:
                loss, gradients = slopes(client, parameters, words(rng, BATCH))
                adam(parameters, gradients, memory, step + 1)
                losses.append(loss)

    for step, (accuracy, alignment) in seen.items():
        on_it = np.fliplr(alignment).diagonal().mean()
        print(
            f"step {step}: {accuracy:.3f} of the held-out letters right, {on_it:.3f} of the weight on the anti-diagonal"
        )
    print(f"cross-entropy: {losses[0]:.3f} at first, {losses[-1]:.4f} at last")

    figure, axes = plt.subplots(1, len(SHOWN) + 1, figsize=(10, 2.6))
    for axis, (step, (accuracy, alignment)) in zip(axes, seen.items(), strict=False):
        axis.imshow(alignment, vmin=0, vmax=1)
        axis.set(title=f"step {step}: {accuracy:.0%} right", xlabel="position looked at")
        axis.spines[:].set_visible(True)
    axes[0].set_ylabel("position to write")
    axes[-1].semilogy(losses)
    axes[-1].set(title="cross-entropy (nats a letter)", xlabel="step")
    plotting.save(figure, folder, "alignment")


if __name__ == "__main__":
    main()
