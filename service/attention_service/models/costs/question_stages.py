"""The stages of a question: the passes of each stage, their sizes, and their peak memory.

Each question states its stages once. Admission reserves the largest peak, ``/complexity`` prints the sum of the stages,
and a turn announces the time of the next part.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attention_contract.schemas.model_requests import ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.cost import Traffic
from attention_service.models.costs.lens_costs import LensCost
from attention_service.models.costs.pass_memory import PassMemory, SweepSizes
from attention_service.models.inputs.input_stacks import SizedImage
from attention_service.models.loaded.checked_request import CheckedRequest

Measure = Literal["gradient", "attention", "hidden", "removed"]
"""The measure of a pass of a request for sources."""


@dataclass(frozen=True)
class Stage:
    """Consecutive passes of one size."""

    texts: int
    length: int
    """Tokens of each text."""
    target: int | None = None
    """Tokens of the decoder, of a model with an encoder and a decoder; default: ``length``."""
    peak_bytes: int = 0
    """Memory besides the model."""
    weights: bool = False
    """True if the passes return attention weights or statistics of them."""
    times: float = 1
    """Number of passes; a pass through half of the layers counts 0.5."""
    reads: float | None = None
    """Number of reads of all parameters; default: ``times``."""
    rows: int = 1
    """Positions of each text whose logits one pass computes."""
    rows_of_all: int | None = None
    """The same, summed over all passes; overrides ``rows``."""
    gradients: int = 0
    """Number of backward passes after the forward pass."""
    after: int = 0
    """Number of cached tokens before ``length``, or before ``target``."""
    encoded: int = 0
    """Number of tokens of the encoder whose keys a decoder has from earlier passes."""
    images: Sequence[SizedImage] = ()
    beside: Traffic | None = None
    """Operations outside the passes, such as the readings of a lens."""
    counted: int = 1
    """Number of passes by which the answer counts the stage, such as one per text."""
    measure: Measure | None = None
    sources: Sequence[int] = ()
    """Indices of the hidden or removed sources, one per text."""

    @property
    def predicted(self) -> int:
        """Tokens of each text whose states give logits: those of the decoder, or ``length`` without one."""
        return self.length if self.target is None else self.target


def held(stages: Iterable[Stage]) -> int:
    """Return the peak memory of a question: the stages run one after another."""
    return max(stage.peak_bytes for stage in stages)


def input_stage(memory: PassMemory, checked: CheckedRequest, request: ModelInput, points: int = 1) -> Stage:
    """Return the forward pass over an input. ``points``: points of an integrated gradient in one batch."""
    inputs, weights = checked.inputs, isinstance(request, ModelWeightsRequest | ModelGradientsRequest)
    return Stage(
        len(inputs.predicted.ids), inputs.text.length, None if inputs.target is None else inputs.target.length,
        memory.needed_bytes(checked, request, points), weights=weights, images=memory.images_of(checked),
    )  # fmt: skip


def sweep_stage(memory: PassMemory, sizes: SweepSizes, copies: int, images: Sequence[SizedImage] = ()) -> Stage:
    """Return the pass without edits, with the peak memory of a pass over ``copies`` edited copies of the texts."""
    target = None if sizes.length == sizes.keys else sizes.length
    return Stage(sizes.batch, sizes.keys, target, memory.sweep_bytes(sizes, copies), images=images)


def lens_stages(stage: Stage, readings: LensCost) -> list[Stage]:
    """Return the forward pass, and the readings of its states."""
    whole = replace(stage, peak_bytes=stage.peak_bytes + readings.peak_bytes)
    return [whole, replace(whole, times=0, beside=readings.traffic)]


def rows_stage(memory: PassMemory, rows: int, length: int, *, of: int | None = None) -> Stage:
    """Return the passes for one batch of Jacobian rows of a text; with ``of``, for all ``of`` rows."""
    times = 1 if of is None else -(-of // rows)
    return Stage(rows, length, peak_bytes=memory.jacobian_bytes(rows, length), times=3 * times)
