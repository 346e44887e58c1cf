"""The younger questions to one model type, each held to a property: by separate passes of transformers or of this.

Each is asked of several texts of unequal lengths in one pass, and held to the same of each text alone.
"""

from collections.abc import Callable
from typing import Final

from transformers import PreTrainedModel

from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.questions.context import context
from tools.models_walk.questions.effects import effects
from tools.models_walk.questions.lenses import lens
from tools.models_walk.questions.paths import paths
from tools.models_walk.questions.plain_runs import IDS, TEXTS, NotAskedError
from tools.models_walk.questions.points import embedded, hidden, mlp
from tools.models_walk.questions.routers import router
from tools.models_walk.questions.shared_passes import shared
from tools.models_walk.questions.vectors import PAIRS, embeddings, similarity

QUESTIONS: Final[dict[str, Callable[[PreTrainedModel, LoadedModel], float]]] = {
    "embeddings": embeddings, "similarity": similarity, "lens": lens, "effects": effects, "paths": paths,
    "context": context, "shared": shared,
    "point mlp": mlp, "point hidden": hidden, "point embeddings": embedded, "point router": router,
}  # fmt: skip
"""The largest error of each, as a share of the largest number that is compared."""

__all__ = ["IDS", "PAIRS", "QUESTIONS", "TEXTS", "NotAskedError"]
