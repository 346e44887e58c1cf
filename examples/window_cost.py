"""Compare a sliding window with dense attention: FLOPs, time and error of the output.

The FLOPs count the pairs that the mask allows. The time is that of every kernel of the server, for lengths n at a
window of 64 keys on each side. The error is the distance of the output from the dense output as the window grows. It
is measured for near tokens that are alike (positions as random Fourier features, so attention is local) and for
independent tokens.

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/window_cost.py``
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

import plotting
from attention_client import Client, KernelUnsuitable

LENGTHS = [256, 512, 1024, 2048]
WINDOW = 64
WIDTHS = [4, 8, 16, 32, 64, 128, 256]
N, HEAD_DIM, HEADS = 1024, 64, 2


def window(width: int) -> dict[str, Any]:
    """Return a spec of a window with this many keys on each side."""
    return {"masks": [{"name": "sliding_window", "left": width, "right": width}]}


def took(client: Client, n: int, spec: dict[str, Any], kernel: str, rng: np.random.Generator) -> float:
    """Return milliseconds on the device: the best of five."""
    q, k, v = rng.normal(size=(3, HEADS, n, HEAD_DIM)).astype(np.float32)
    return min(client.attention.forward(q, k, v, spec=spec, kernel=kernel).ran.compute_ms for _ in range(5))


def times(client: Client, spec: dict[str, Any], kernel: str, rng: np.random.Generator) -> list[float] | None:
    """Return milliseconds for each length; None if the kernel cannot compute the spec."""
    try:
        return [took(client, n, spec, kernel, rng) for n in LENGTHS]
    except KernelUnsuitable:
        return None


def local(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return tokens that are alike at near positions: random Fourier features of a Gaussian of width 16."""
    frequencies = rng.normal(size=(HEAD_DIM // 2, 1)) / 16
    angles = frequencies * np.arange(N)
    return np.concatenate([np.cos(angles), np.sin(angles)]).T * 1.7


def attended(client: Client, q: NDArray[np.float64], v: NDArray[np.float64], width: int | None) -> NDArray[np.float64]:
    """Return the output within a window, or the dense output."""
    reply = client.attention.forward(q, q, v, spec={} if width is None else window(width))
    output: NDArray[np.float64] = reply.output
    return output


def main() -> None:
    folder = plotting.output_folder(__doc__)
    rng = np.random.default_rng(0)
    with Client() as client:
        sizes: dict[str, Any] = {"num_heads": HEADS, "head_dim": HEAD_DIM}
        dense = client.attention.complexity(LENGTHS[0], LENGTHS, **sizes)
        narrow = client.attention.complexity(LENGTHS[0], LENGTHS, spec=window(WINDOW), **sizes)
        kernels = [one.name for one in client.server.variants().variants if one.kind == "kernel"]
        measured = {
            (kernel, name): ms
            for kernel in kernels
            for name, spec in (("dense", {}), ("window", window(WINDOW)))
            if (ms := times(client, spec, kernel, rng)) is not None
        }
        rng = np.random.default_rng(1)  # independent of the kernels before
        v = rng.normal(size=(N, 1)).cumsum(0)  # a random walk: near tokens are alike
        v = (v - v.mean()) / v.std()
        lost = {}
        for name, q in (("near tokens alike", local(rng)), ("independent tokens", rng.normal(size=(N, HEAD_DIM)))):
            whole = attended(client, q, v, None)
            lost[name] = [
                float(np.linalg.norm(attended(client, q, v, width) - whole) / np.linalg.norm(whole)) for width in WIDTHS
            ]

    flops = {
        "dense": [cost.forward.dense.total for cost in dense.costs],
        "window": [cost.forward.masked.total for cost in narrow.costs],
    }
    for name, counts in flops.items():
        grows = np.log2(counts[-1] / counts[-2])
        print(f"{name}: {counts[-1] / 1e6:,.0f} MFLOP at n = {LENGTHS[-1]}, growing as n^{grows:.2f}")
    for (kernel, name), ms in measured.items():
        print(f"{kernel} {name}: " + ", ".join(f"{one:.2f} ms at {n}" for n, one in zip(LENGTHS, ms, strict=True)))
    chosen = narrow.costs[-1]
    print(f"planned for the window at n = {LENGTHS[-1]}: {chosen.kernel}, {chosen.predicted_ms:.2f} ms")
    for name, errors in lost.items():
        print(
            f"lost, {name}: " + ", ".join(f"{one:.3f} at ±{width}" for width, one in zip(WIDTHS, errors, strict=True))
        )

    figure, (counted, taken, losing) = plt.subplots(1, 3, figsize=(10, 3))
    for name, counts in flops.items():
        counted.loglog(LENGTHS, counts, marker="o", label=name)
    counted.set(title="FLOPs that the mask leaves", xlabel="n")
    counted.legend()
    for (kernel, name), ms in measured.items():
        style = {"color": f"C{kernels.index(kernel)}", "linestyle": "-" if name == "window" else ":"}
        taken.loglog(LENGTHS, ms, marker="o", label=f"{kernel}, {name}", **style)
    taken.set(title="milliseconds measured", xlabel="n")
    taken.legend(fontsize=7)
    for name, errors in lost.items():
        losing.loglog(WIDTHS, np.maximum(errors, 1e-4), marker="o", label=name)
    losing.set(title=f"relative error of the output, n = {N}", xlabel="keys to either side")
    losing.legend()
    for axis, ticks in ((counted, LENGTHS), (taken, LENGTHS), (losing, WIDTHS)):
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
    plotting.save(figure, folder, "window_cost")


if __name__ == "__main__":
    main()
