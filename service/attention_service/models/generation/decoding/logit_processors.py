"""Processors of the logits from which a generation takes its next token: changes of them, and a check."""

import torch
from torch import Tensor
from transformers import LogitsProcessor

from attention_contract.errors import InvalidRequest, NotFinite


def no_finite_logits() -> NotFinite:
    """Return the error of a text whose logits are NaN, or beyond the numbers of their dtype."""
    return NotFinite("the logits of the next token are not finite", param="model", field="logits")


class LogitChanges(LogitsProcessor):
    """Penalties for tokens that were generated before, and biases."""

    def __init__(self, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self._presence, self._frequency, self.bias = presence, frequency, bias
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token, changed. ``input_ids [B, T]`` are those before."""
        if self._start is None:
            self._start = input_ids.shape[1]
        counts = torch.zeros_like(scores)
        generated = input_ids[:, self._start :]
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        scores = scores - self._presence * (counts > 0) - self._frequency * counts
        if self.bias:
            tokens = torch.tensor([*self.bias], device=scores.device)
            scores[:, tokens] += torch.tensor([*self.bias.values()], dtype=scores.dtype, device=scores.device)
        return scores


class DrawableLogits(LogitsProcessor):
    """Refuses logits that have no softmax, before a token is drawn from them.

    PyTorch raises an error without facts for their probabilities, and on a GPU the process is lost with it.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` as they are. Raises NotFinite unless each row has a finite maximum.

        A logit of -inf is a token that cannot be drawn.
        """
        most = scores.amax(-1)  # NaN if any is NaN
        if bool((most / self._temperature).isfinite().all()):
            return scores
        if bool(most.isfinite().all()):
            raise InvalidRequest.at("temperature", f"logits overflow if divided by {self._temperature}; 0 divides none")
        raise no_finite_logits()
