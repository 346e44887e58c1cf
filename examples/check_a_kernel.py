"""Check your own attention kernel, forward and backward, against the service's exact numbers in float64.

The kernel here is an online softmax over blocks of keys (Milakov & Gimelshein 2018). Its backward pass recomputes the
weights (Dao et al. 2022). Replace it by your own kernel.

Needs a running service (``attention serve``, or ATTENTION_URL): ``python examples/check_a_kernel.py``
"""

import numpy as np
from numpy.typing import NDArray

from attention_client import Client

Array = NDArray[np.float64]
BLOCK = 16


def scores_of(q: Array, k: Array, start: int, stop: int) -> Array:
    """Return the causal scaled scores of every query and a block of keys: ``[B, H, Q, stop − start]``."""
    scores = q @ k[..., start:stop, :].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    hidden = np.arange(start, stop) > np.arange(q.shape[-2])[:, None]
    return np.where(hidden, -np.inf, scores)


def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return the output ``[B, H, Q, V]`` and the log of the sum of exponentials ``[B, H, Q, 1]``."""
    highest = np.full((*q.shape[:-1], 1), -np.inf)
    total, output = np.zeros_like(highest), np.zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, k.shape[-2], BLOCK):
        scores = scores_of(q, k, start, min(start + BLOCK, k.shape[-2]))
        higher = np.maximum(highest, scores.max(-1, keepdims=True))
        rescale, weights = np.exp(highest - higher), np.exp(scores - higher)
        total = total * rescale + weights.sum(-1, keepdims=True)
        output = output * rescale + weights @ v[..., start : start + BLOCK, :]
        highest = higher
    return output / total, highest + np.log(total)


def backward(q: Array, k: Array, v: Array, output: Array, lse: Array, upstream: Array) -> dict[str, Array]:
    """Return the gradients with respect to q, k and v."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    drift = (upstream * output).sum(-1, keepdims=True)
    for start in range(0, k.shape[-2], BLOCK):
        block = np.s_[..., start : start + BLOCK, :]
        weights = np.exp(scores_of(q, k, start, min(start + BLOCK, k.shape[-2])) - lse)
        dscores = weights * (upstream @ v[block].swapaxes(-1, -2) - drift) / np.sqrt(q.shape[-1])
        dq += dscores @ k[block]
        dk[block] = dscores.swapaxes(-1, -2) @ q
        dv[block] = weights.swapaxes(-1, -2) @ upstream
    return {"query": dq, "key": dk, "value": dv}


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v, upstream = rng.normal(size=(4, 2, 3, 40, 8))  # [batch, heads, tokens, width]
    output, lse = forward(q, k, v)
    mine = {"output": output, "lse": lse[..., 0], **backward(q, k, v, output, lse, upstream)}

    with Client() as client:
        exact = client.attention.gradients(
            q, k, v, spec={"masks": [{"name": "causal"}]},
            upstream=upstream, wrt=["query", "key", "value"], return_=["output", "lse"],
        )  # fmt: skip
    theirs = {"output": exact.output, "lse": exact.lse, **exact.gradients}

    for name, array in mine.items():
        difference = np.abs(array - theirs[name]).max()
        print(f"{name:<7} largest difference {difference:.1e}")
        assert difference < 1e-12, name


if __name__ == "__main__":
    main()
