"""The path of integrated gradients: from a baseline straight to the embeddings of an input, by a rule of quadrature."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.integrated_gradients import BaselineToken, IntegratedGradients, PathRule
from attention_service.core.pullback import pullback
from attention_service.models.answers.graph_runs import GraphRuns
from attention_service.models.costs.answer_parts import BACKWARD, OwnTime, Passes
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.points import EMBEDDINGS

_DECADES: Final = range(33, 0, -3)
"""Exponents tried for the smallest scale of an integrated gradient, 10 to the minus this. float32 ends at 38."""
_VALUE_TOLERANCE: Final = 1e-4
"""Difference between two values of L that count as one."""
_ROWS: Final = 4096
"""Tokens whose embeddings are averaged at once."""


@dataclass(frozen=True)
class BoundPath:
    """A path of integrated gradients, checked."""

    steps: int
    rule: PathRule
    origin: Tensor | None = None
    """The states at its begin, of a shape that broadcasts to the embeddings; None for zeros."""


def bound_path(loaded: LoadedModel, checked: CheckedRequest, asked: IntegratedGradients) -> BoundPath:
    """Check a path and read its baseline. Raises InvalidRequest that names the field at fault."""
    rule: PathRule = asked.rule or ("log_gauss" if asked.from_zeros else "gauss")
    if asked.from_zeros:
        return BoundPath(asked.steps, rule)
    if loaded.reader.enters != "tokens" or checked.inputs.media is not None:
        raise InvalidRequest.at(
            "integrated", "what enters the model are no tokens alone; take the baseline of zeros, or send a text alone"
        )
    if asked.baseline_embeddings is not None:
        return BoundPath(asked.steps, rule, _given(loaded, checked, asked))
    if isinstance(asked.baseline, BaselineToken):
        token = loaded.reader.token_id(asked.baseline.token, "integrated.baseline.token")
        if token >= loaded.reader.vocabulary:
            raise InvalidRequest.at("integrated.baseline.token", f"the model has no embedding of token {token}")
        return BoundPath(asked.steps, rule, _embedded(loaded, [token])[0])
    known = loaded.reader.vocabulary
    sums = [
        _embedded(loaded, range(start, min(start + _ROWS, known))).double().sum(0) for start in range(0, known, _ROWS)
    ]
    return BoundPath(asked.steps, rule, (torch.stack(sums).sum(0) / known).float())


def _given(loaded: LoadedModel, checked: CheckedRequest, asked: IntegratedGradients) -> Tensor:
    """The baseline that came as numbers."""
    field = "integrated.baseline_embeddings"
    given = torch.from_numpy(np.asarray(asked.baseline_embeddings, np.float32))
    batch, length = checked.inputs.text.ids.shape
    shape = (batch, length, _embedded(loaded, [0]).shape[-1])
    if given.ndim not in {1, 2, 3} or tuple(given.shape) != shape[-given.ndim :]:
        raise InvalidRequest.at(
            field, f"expected {list(shape)}, {list(shape[1:])} or {[shape[-1]]}; got {list(given.shape)}",
            expected=list(shape), actual=list(given.shape),
        )  # fmt: skip
    if not bool(given.isfinite().all()):
        raise InvalidRequest.at(field, "expected finite numbers")
    return given.to(loaded.model.device)


def _embedded(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """The embeddings ``[tokens, d_model]`` of these tokens, as they enter the model."""
    index = torch.tensor([list(ids)], device=loaded.model.device)
    with torch.inference_mode():
        states: Tensor = loaded.entering.table(index)[0]
        return states.clone()


@dataclass(frozen=True)
class EmbeddingPath:
    """The runs along one path; ``points`` of it are one batch."""

    runs: GraphRuns
    time: OwnTime
    path: BoundPath
    points: int

    def change(self, embedded: Tensor) -> Tensor:
        """The embeddings minus the baseline."""
        origin = self.path.origin
        return embedded if origin is None else embedded - origin.to(embedded.device, embedded.dtype)

    def mean_gradient(self, embedded: Tensor) -> Passes[tuple[Tensor, Tensor]]:
        """The gradient averaged over the path, and L ``[B]`` at its begin."""
        if self.path.rule == "log_gauss":
            decades, baseline = yield from self.decades(embedded)
        else:
            yield from self.time.between(1)
            decades, [baseline] = 0, self.values(embedded, [0.0])
        scales, weights = quadrature(self.path.rule, self.path.steps, decades)
        shares = torch.from_numpy(weights).to(embedded.device)
        total = torch.zeros_like(embedded)
        for start in range(0, self.path.steps, self.points):
            yield from self.time.between(BACKWARD * min(self.points, self.path.steps - start))
            some = slice(start, start + self.points)
            run = self.runs.run_scaled(embedded, scales[some].tolist(), self._origin(embedded))
            [gradient] = pullback([run.value], [run.at[EMBEDDINGS]], [torch.ones_like(run.value)])
            wide = torch.promote_types(gradient.dtype, torch.float32)
            by_point = gradient.to(wide).view(-1, *embedded.shape)
            total += torch.tensordot(shares[some].to(wide), by_point, 1).to(total.dtype)
        if total.dtype == torch.float16 and not bool(total.isfinite().all()):
            raise InvalidRequest.at(
                "integrated",
                "the gradients at small embeddings exceed float16; load the model with dtype bfloat16 or float32",
            )
        return total, baseline

    def decades(self, embedded: Tensor) -> Passes[tuple[int, Tensor]]:
        """The number of decades below 1 of the scale of the embeddings in which L comes from that of zeros, and that L.

        A norm multiplies small states by 1 / √ε, so each one of a deep model brings the end nearer to zero.
        """
        yield from self.time.between(1)
        [baseline] = self.values(embedded, [0.0])
        smallest = _DECADES[0]
        for start in range(0, len(_DECADES), self.points):
            some = _DECADES[start : start + self.points]
            yield from self.time.between(len(some))
            for decades, value in zip(some, self.values(embedded, [10.0**-exponent for exponent in some]), strict=True):
                if bool(((value - baseline).abs() > _VALUE_TOLERANCE * baseline.abs().clamp_min(1)).any()):
                    return smallest, baseline
                smallest = decades
        return smallest, baseline

    def values(self, embedded: Tensor, scales: Sequence[float]) -> Tensor:
        """L ``[points, B]`` at these scales of the embeddings."""
        value = self.runs.run_scaled(embedded, scales, self._origin(embedded), graph=False).value
        return value.view(len(scales), -1)

    def _origin(self, embedded: Tensor) -> Tensor | None:
        return None if self.path.origin is None else self.path.origin.to(embedded.device)


def quadrature(rule: PathRule, steps: int, decades: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The scales of the points of a path, and the share of each in the mean over the path from 0 to 1.

    decades: those below 1 over which ``log_gauss`` integrates, as L comes from that of zeros there.
    """
    if rule == "midpoint":
        return (np.arange(steps) + 0.5) / steps, np.full(steps, 1 / steps)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    if rule == "gauss":
        return (nodes + 1) / 2, weights / 2
    length = decades * math.log(10)
    scales = np.exp((nodes - 1) / 2 * length)
    return scales, weights / 2 * length * scales
