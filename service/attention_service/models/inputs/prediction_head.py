"""The head of a model: the rows of logits that it makes of an input, and their probabilities.

Notation: B texts, L tokens, P positions whose predictions are wanted, V tokens of a vocabulary, or classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.text_positions import TokenPositions
from attention_service.core.tensors import wide
from attention_service.models.folders.head_kinds import Predicts, Unit, class_names, head_kind
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Inputs, Stack
from attention_service.models.inputs.model_limits import object_count

Places = list[list[int]]
"""The indices of the positions of each text."""


class Rows(NamedTuple):
    """The rows of logits at some positions."""

    logits: Tensor
    """``[B, P, V]``"""
    places: Places
    partition: Tensor | None = None
    """``[B, 1, V]``: ln Σ exp(logit) over the tokens of a text, if that is what a probability is a share of."""

    @property
    def halves(self) -> tuple["Rows", "Rows"]:
        """The rows of the first half of the texts, and of the second."""
        count = len(self.logits) // 2
        first, second = (
            Rows(self.logits[half], self.places[half], None if self.partition is None else self.partition[half])
            for half in (slice(count), slice(count, None))
        )
        return first, second

    def without_last(self, count: int) -> "Rows":
        """The rows of all positions but the last ones."""
        return self._replace(logits=self.logits[:, :-count], places=[row[:-count] for row in self.places])


@dataclass(frozen=True)
class PredictionHead:
    """The predictions of one model."""

    predicts: Predicts | None
    """None for a model without a head that predicts."""
    unit: Unit = "token"
    classes: tuple[str, ...] = ()
    """Names of the classes, if it predicts classes and not texts or tokens of a vocabulary."""
    several: bool = False
    """True if an input may have several of the classes, so that each has a probability of its own."""
    objects: int = 0
    """The last tokens of an input, if these alone have predictions, as objects."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the head of a model."""
        kind, whole = head_kind(type(model).__name__), model
        if kind is not None and kind.predicts == "class":
            labels = getattr(model.config, "problem_type", None) == "multi_label_classification"
            several = not kind.exclusive or (labels and kind.unit == "input")
            objects = object_count(model.config) if kind.unit == "object" else 0
            return cls("class", kind.unit, class_names(kind, model.config.id2label), several, objects)
        head: Any = whole.get_output_embeddings()  # type: ignore[no-untyped-call]
        labels_frames = type(model).__name__.endswith("ForCTC")  # by a head that is no output embedding
        if model.main_input_name == "pixel_values" or (head is None and not labels_frames):
            return cls(None)
        return cls("own" if kind is not None and kind.predicts == "own" else "next")

    @property
    def by_token(self) -> bool:
        """True if each token has a prediction."""
        return self.unit in {"token", "span", "object"}

    @property
    def scores(self) -> bool:
        """True if it gives an input one number, as a reranker does, whose logit is the answer itself."""
        return self.unit == "input" and len(self.classes) == 1

    # ── positions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def places(self, positions: TokenPositions | None, inputs: Inputs) -> Places | None:
        """The indices of these positions in each text; None for those that its logits tell. Raises InvalidRequest.

        By default the last token, of a head that classifies tokens or objects every one, and of one that finds a span
        the likeliest ends.
        """
        if not self.by_token:
            if positions is not None:
                noun = {"choice": "one of the texts"}.get(self.unit, "one class for an input")
                raise InvalidRequest.at("positions", f"the model predicts {noun}; leave positions out")
            return [[0]] * (1 if self.unit == "choice" else len(inputs.predicted.ids))
        if positions is None and self.unit == "span":
            return None
        if positions is None and self.predicts == "class":
            return self.every(inputs.predicted)
        places = places_of(positions, inputs.predicted)
        least = self._first(inputs.predicted)
        if (low := min(map(min, places))) < least:
            raise InvalidRequest.at(
                "positions", f"token {low} is a patch; objects are the tokens from {least} on, and have predictions"
            )
        return places

    def every(self, stack: Stack) -> Places:
        """The indices of all predictions of each text."""
        return [[*range(self._first(stack), stack.length)]] * len(stack.ids)

    def _first(self, stack: Stack) -> int:
        """The first token with a prediction."""
        return stack.length - self.objects if self.objects else 0

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def rows(self, output: Any, places: Places | None, stack: Stack, *, alike: bool) -> Rows:
        """The rows of a model's output at these places; ``alike``: it has those of these places alone.

        Without a head, the rows of the last hidden states.
        """
        if self.predicts is None or self.predicts != "class":
            states: Tensor = output.last_hidden_state if self.predicts is None else output.logits
            if self.predicts is None and states.ndim == 4:  # a grid of patches, whose channels come first
                states = states.flatten(2).transpose(1, 2)
            chosen = places or []
            return Rows(states if alike and self.predicts else rows_at(states, chosen), chosen)
        if self.unit == "choice":
            return Rows(output.logits[:, None], places or [[0]])
        if self.unit == "input":
            return Rows(output.logits[:, None], places or [[0]] * len(stack.ids))
        if self.unit == "token":
            return Rows(rows_at(output.logits, places or []), places or [])
        if self.unit == "object":
            chosen, first = places or [], self._first(stack)
            return Rows(rows_at(output.logits, [[place - first for place in row] for row in chosen]), chosen)
        logits = torch.stack([output.start_logits, output.end_logits], -1)
        real = logits if stack.mask is None else logits.masked_fill(~stack.mask[..., None], -torch.inf)
        chosen = places or real.argmax(1).tolist()
        return Rows(rows_at(logits, chosen), chosen, wide(real).logsumexp(1, keepdim=True))

    def logs(self, logits: Tensor, partition: Tensor | None = None) -> Tensor:
        """The logarithms of the probabilities of rows ``[…, V]``; of a head that scores, the scores."""
        if self.scores:
            return logits
        if self.several:
            return torch.nn.functional.logsigmoid(logits)
        return logits.log_softmax(-1) if partition is None else logits - partition.to(logits)

    def probabilities(self, logs: Tensor) -> Tensor:
        """The probabilities of what ``logs`` returned; of a score its logistic function, as rerankers show it."""
        return logs.sigmoid() if self.scores else logs.exp()

    def divergence(self, before: Tensor, after: Tensor) -> Tensor:
        """Σ p · ln(p / q) ``[…]`` of ln p and ln q ``[…, V]``; of each class by itself where several can hold."""
        total = (before.exp() * (before - after)).nan_to_num(0.0).sum(-1)
        if self.several:
            rests = [torch.log1p(-log_p.exp()) for log_p in (before, after)]
            total += (rests[0].exp() * (rests[0] - rests[1])).nan_to_num(0.0).sum(-1)
        return total.clamp_min(0.0)

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def named(self, reader: InputReader, ids: Sequence[int]) -> list[str]:
        """The tokens or classes of these ids, for reading."""
        if self.predicts != "class":
            return reader.readable(ids)
        return [self.classes[class_id] if self.classes else str(class_id) for class_id in ids]

    def find(self, reader: InputReader, token: int | str, param: str, choices: int) -> int:
        """The id of a token or a class, given as such or by its text. Raises InvalidRequest.

        ``choices``: the texts of which a head chooses one.
        """
        if self.predicts != "class":
            return reader.token_id(token, param)
        names = self.classes or tuple(map(str, range(choices)))
        ids = [class_id for class_id, name in enumerate(names) if token in (class_id, name)]
        if len(ids) != 1:
            noun = f"classes ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})" if self.classes else "texts"
            raise InvalidRequest.at(param, f"{token!r} is not one of the {len(names)} {noun}", limit=len(names))
        return ids[0]


def places_of(positions: TokenPositions | None, stack: Stack) -> Places:
    """The indices of these positions of each text, counted within it from its begin, or from its end if negative.

    Padding at either side is not counted. Default: the last. Raises InvalidRequest for one that a text does not have,
    and for a list of another number of texts.
    """
    wanted: Any = [-1] if positions is None else positions
    texts = stack.real_tokens
    if not isinstance(wanted[0], list):
        shortest = ", the tokens of the shortest text" if len(texts) > 1 else ""
        _check_range(wanted, min(map(len, texts)), "positions", shortest)
        return [[tokens[position] for position in wanted] for tokens in texts]
    if len(wanted) != len(texts):
        raise InvalidRequest.at(
            "positions", f"expected a list for each of {len(texts)} texts; got {len(wanted)}",
            expected=len(texts), actual=len(wanted),
        )  # fmt: skip
    for text, (row, tokens) in enumerate(zip(wanted, texts, strict=True)):
        _check_range(row, len(tokens), f"positions.{text}")
    return [[tokens[position] for position in row] for row, tokens in zip(wanted, texts, strict=True)]


def _check_range(positions: Sequence[int], length: int, param: str, of: str = "") -> None:
    """Raise InvalidRequest for a position that a text of so many tokens does not have."""
    for index, position in enumerate(positions):
        if not -length <= position < length:
            raise InvalidRequest.at(
                f"{param}.{index}",
                f"{position} is out of range; expected {-length} to {length - 1}{of}",
                limit=length,
            )


def rows_at(logits: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """``[B, positions, V]``: the rows of logits ``[B, L, V]`` at these places of each text."""
    index = torch.tensor([list(row) for row in places], device=logits.device)
    return logits.gather(1, index[:, :, None].expand(-1, -1, logits.shape[-1]))
