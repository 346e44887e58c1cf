"""The registry of what a notebook shows of each kind of reply: ``_repr_html_`` of every value of the wire."""

from collections.abc import Callable
from typing import Any, Final

from pydantic import BaseModel

from attention_contract.schemas.analyses.attribution import AttributionReply
from attention_contract.schemas.analyses.context import ContextReply
from attention_contract.schemas.analyses.lenses import ModelLensReply
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics
from attention_contract.schemas.attention import ForwardReply
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply
from attention_contract.schemas.model_requests import ModelForwardReply, ModelGradientsReply, ModelWeightsReply
from attention_contract.schemas.openai import ChatCompletion, Completion, Embeddings
from attention_contract.schemas.openai_api.responses import ModelResponse
from attention_contract.schemas.openai_api.tokenization import Tokenization
from attention_contract.schemas.openai_api.transcriptions import Transcription
from attention_contract.schemas.text_similarity import TextSimilarityReply
from attention_contract.schemas.weights import WeightsReply
from attention_pictures.lens.lens_html import lens_html
from attention_pictures.notebook import generated_maps, model_maps, module_maps
from attention_pictures.notebook.html_tables import facts_html
from attention_pictures.notebook.notebook_maps import html_of, maps_of_tensors

VIEWS: Final[dict[type, Callable[[Any], str | None]]] = {
    ForwardReply: module_maps.forward_html,
    WeightsReply: module_maps.weights_html,
    AttributionReply: module_maps.attribution_html,
    RecordingStatistics: module_maps.recorded_html,
    ComplexityReply: module_maps.complexity_html,
    ModelForwardReply: model_maps.forward_html,
    ModelWeightsReply: model_maps.weights_html,
    ModelGradientsReply: model_maps.gradients_html,
    ModelEffectsReply: model_maps.effects_html,
    ModelLensReply: lens_html,
    ContextReply: model_maps.context_html,
    ModelComplexityReply: model_maps.complexity_html,
    TextSimilarityReply: model_maps.similarity_html,
    ChatCompletion: generated_maps.chat_html,
    Completion: generated_maps.completion_html,
    ModelResponse: generated_maps.response_html,
    Transcription: generated_maps.transcription_html,
    Embeddings: generated_maps.embeddings_html,
    Tokenization: generated_maps.tokenization_html,
}
"""Replies with a view of their own. Others show their fields, and a map of each tensor."""


def notebook_html(value: BaseModel) -> str:
    """The view of a value, offline: its maps or tables; without one, its fields and a map of each of its tensors."""
    view = next((VIEWS[kind] for kind in type(value).__mro__ if kind in VIEWS), None)
    shown = None if view is None else view(value)
    return shown or facts_html(value) + (html_of(maps_of_tensors(value)) or "")
