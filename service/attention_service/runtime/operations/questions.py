"""The questions about one attention beside its output: how each is bound and planned, and its reply."""

from typing import Any, Final

from attention_contract.base import WireModel
from attention_contract.schemas.analyses.attribution import AttributionReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.weights import WeightsReply
from attention_service.runtime.operations import attribution, effects, gradients, weights
from attention_service.runtime.scheduling.request_runner import Prepare

QUESTIONS: Final[dict[str, tuple[Prepare[Any], type[WireModel]]]] = {
    "weights": (weights.prepare, WeightsReply),
    "attribution": (attribution.prepare, AttributionReply),
    "gradients": (gradients.prepare, GradientsReply),
    "effects": (effects.prepare, EffectsReply),
}
"""Each is asked about a module, about raw attention, or about new tokens over the past of a session."""
