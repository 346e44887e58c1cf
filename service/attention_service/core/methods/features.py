"""Feature maps φ whose products φ(q)·φ(k) replace exp(q·k)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import elu

FeatureName = Literal["elu", "relu", "identity", "l2"]


@dataclass(frozen=True)
class Elementwise:
    """Features without anything drawn or learned, as many as the head is wide.

    ``elu``: elu(x) + 1, positive (Katharopoulos et al. 2020, eq. 7). ``relu``: max(x, 0). ``identity``: x.
    ``l2``: x / √(Σ x² + 10⁻⁶), of length 1 (Yang et al. 2024, section 3.3).
    """

    name: FeatureName
    scale: float = 1.0
    """Factor on the queries' features."""

    def queries(self, x: Tensor) -> Tensor:
        """φ(x) · scale."""
        mapped = self._map(x)
        return mapped if self.scale == 1 else mapped * self.scale

    def keys(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, None]:
        """φ(x)."""
        mapped = self._map(x)
        return mapped if real is None else mapped.masked_fill(~real, 0), None

    def _map(self, x: Tensor) -> Tensor:
        match self.name:
            case "elu":
                return elu(x) + 1
            case "relu":
                return x.relu()
            case "l2":
                inverse: Tensor = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
                return x * inverse
        return x


@dataclass(frozen=True)
class PositiveRandom:
    """φ(x)_f = exp(ω_f·x − |x|²/2), whose products are exp(q·k) on average over ω ~ N(0, I).

    The common factor 1/√F is left out: it cancels where the sum over the keys is divided by. So do the maxima that
    are taken off the exponents: of queries a query's own, of keys one for all of a call, which is given back.
    Source: Choromanski et al. 2021, lemma 1 and eq. 5.
    """

    directions: Tensor
    """``[F, D]``, in the dtype that is computed in."""
    query_factor: float
    key_factor: float
    """Queries and keys are scaled by these first; their product is the factor on q·k, whose sign the query has."""

    def queries(self, x: Tensor) -> Tensor:
        """Each query's largest feature is 1."""
        exponents = self._exponents(x * self.query_factor)
        return (exponents - exponents.detach().amax(-1, keepdim=True)).exp()

    def keys(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The largest feature of all keys of a head is 1, and its logarithm before is returned."""
        exponents = self._exponents(x * self.key_factor)
        if real is not None:
            exponents = exponents.masked_fill(~real, -torch.inf)
        lowest = torch.finfo(x.dtype).min
        if not x.shape[-2]:
            return exponents.exp(), exponents.new_full((*x.shape[:-2], 1, 1), lowest)
        highest = exponents.detach().amax((-2, -1), keepdim=True).clamp(min=lowest)
        return (exponents - highest).exp(), highest

    def _exponents(self, x: Tensor) -> Tensor:
        return x @ self.directions.mT - x.square().sum(-1, keepdim=True) / 2


def orthogonal_directions(count: int, width: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """``[count, width]`` in float64: rows N(0, I) each, orthogonal within every ``width`` of them.

    Orthogonal matrices that are uniform, their rows given the lengths of independent normal vectors. Drawn on the
    CPU; on the meta device nothing is drawn.
    Source: Yu et al. 2016, section 3; uniform by the sign of R's diagonal: Mezzadri 2007, section 5.
    """
    generator = torch.Generator(device).manual_seed(seed) if str(device) == "cpu" else None
    squares = -(-count // width)
    normal = torch.randn(squares, width, width, generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    others = torch.randn(squares * width, width, generator=generator, dtype=torch.float64, device=device)
    lengths = others.norm(dim=1, keepdim=True)
    del others
    directions: Tensor = (q.mT.reshape(-1, width) * lengths)[:count]
    return directions
