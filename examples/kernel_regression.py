"""Learn the bandwidth of a Nadaraya-Watson estimator with the service's gradients.

The score −(q − k)² / 2σ² with a softmax is the Nadaraya-Watson estimator with a Gaussian kernel (Nadaraya 1964;
Watson 1964). The queries are the places to predict. The keys are the measured places, and the values the
measurements. Gradient descent on the leave-one-out error learns σ (``score.sigma``). A mask forbids each point to
look at itself; without the mask, σ would shrink to 0 and the estimator would learn the noise.

Needs a running service (``attention serve``, or ATTENTION_URL) and the extra ``plot``: ``python
examples/kernel_regression.py``
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

import plotting
from attention_client import Client

Array = NDArray[np.float64]
SPEC: dict[str, Any] = {"score": {"name": "gaussian", "sigma": "learned"}}
POINTS, HELD_OUT, NOISE = 120, 1000, 0.3
STEPS, RATE = 40, 2.0
FIXED = [0.02, 0.5, 1.0, 2.0]


def truth(x: Array) -> Array:
    """Return the true function, without noise."""
    return np.sin(2 * x) + 0.5 * np.sin(5 * x) + 0.3 * x


def sample(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Draw places ``[count, 1]`` and noisy measurements."""
    x = np.sort(rng.uniform(0, 6, (count, 1)), axis=0)
    return x, truth(x) + NOISE * rng.normal(size=x.shape)


class Estimator:
    """Nadaraya-Watson estimator over measured points, computed by the service."""

    def __init__(self, client: Client, x: Array, y: Array) -> None:
        self.client, self.x, self.y = client, x, y
        self.others = ~np.eye(len(x), dtype=bool)

    def predict(self, at: Array, sigma: float) -> Array:
        """Estimate the function at these places."""
        reply = self.client.attention.forward(at, self.x, self.y, spec=SPEC, parameters={"score.sigma": [sigma]})
        output: Array = reply.output
        return output

    def left_out(self, sigma: float) -> Array:
        """Estimate the function at each measured point from all others."""
        options: dict[str, Any] = {"spec": SPEC, "parameters": {"score.sigma": [sigma]}, "mask": self.others}
        output: Array = self.client.attention.forward(self.x, self.x, self.y, **options).output
        return output

    def slope(self, sigma: float) -> float:
        """Return ∂/∂σ of the mean squared leave-one-out error. The upstream gradient is that of the error."""
        upstream = 2 * (self.left_out(sigma) - self.y) / len(self.x)
        reply = self.client.attention.gradients(
            self.x, self.x, self.y, spec=SPEC, parameters={"score.sigma": [sigma]}, mask=self.others,
            upstream=upstream, wrt=["score.sigma"],
        )  # fmt: skip
        return float(reply.gradients["score.sigma"][0])


def learn(estimator: Estimator) -> list[float]:
    """Return σ at every step of gradient descent over ln σ, from 1."""
    path = [1.0]
    for _ in range(STEPS):
        sigma = path[-1]
        path.append(sigma * float(np.exp(-RATE * sigma * estimator.slope(sigma))))
    return path


def main() -> None:
    folder = plotting.output_folder(__doc__)
    rng = np.random.default_rng(0)
    (x, y), (new_x, new_y) = sample(rng, POINTS), sample(rng, HELD_OUT)
    grid = np.geomspace(0.02, 2, 41)
    with Client() as client:
        estimator = Estimator(client, x, y)
        path = learn(estimator)
        learned = path[-1]
        errors = {
            sigma: float(((estimator.predict(new_x, sigma) - new_y) ** 2).mean()) for sigma in [learned, *FIXED, *grid]
        }
        left_out = [float(((estimator.left_out(sigma) - y) ** 2).mean()) for sigma in grid]
        dense = np.linspace(0, 6, 300)[:, None]
        curves = {sigma: estimator.predict(dense, sigma) for sigma in (learned, FIXED[0], 1.0)}

    print(f"learned sigma: {learned:.4f} after {STEPS} steps from 1, the last one of {abs(path[-1] - path[-2]):.1e}")
    print(f"held-out error: {errors[learned]:.4f} with the learned sigma; the noise alone is {NOISE**2:.4f}")
    for sigma in FIXED:
        print(f"held-out error: {errors[sigma]:.4f} with sigma = {sigma}")
    best = min(grid, key=lambda sigma: errors[sigma])
    print(f"best of a grid on the held-out points: {errors[best]:.4f} with sigma = {best:.3f}")

    figure, (fit, error, way) = plt.subplots(1, 3, figsize=(10, 3), width_ratios=[2, 1.2, 1])
    fit.plot(x, y, ".", color="gray", label="measured")
    fit.plot(dense, truth(dense), ":", color="black", label="truth")
    for sigma, curve in curves.items():
        fit.plot(dense, curve, label=f"σ = {sigma:.2f}" + (" (learned)" if sigma == learned else ""))
    fit.set(title="Nadaraya-Watson estimates")
    fit.legend(fontsize=7, ncols=2)
    error.loglog(grid, left_out, label="leave-one-out")
    error.loglog(grid, [errors[sigma] for sigma in grid], label="held-out")
    error.axvline(learned, color="gray", linestyle=":", label="learned σ")
    error.set(title="squared error", xlabel="σ")
    error.legend()
    way.plot(path, marker=".")
    way.set(title="σ by gradient descent", xlabel="step", ylim=(0, None))
    plotting.save(figure, folder, "kernel_regression")


if __name__ == "__main__":
    main()
