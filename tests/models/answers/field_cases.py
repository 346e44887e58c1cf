"""A case for each optional field of each request to a whole model: a value that changes the answer where it can.

The fields are read from the contract, so a new one needs a case (``test_every_field.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

from tests.client.tiny_models import tokenizer
from tests.models.answers.small_classifiers import loaded as classifier
from tests.models.inputs.images import small_encoders
from tests.models.small_models import device
from tests.models.small_models import loaded as small
from tools.models_walk.model_types import built

from attention_contract.base import WireModel
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import DrawOptions
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.loaded.loaded_model import LoadedModel

Fields = Mapping[str, Any]
TEXT: Final = {"text": "the cat sat on the mat"}
OTHER: Final = "the dog sat on the mat"
SENTENCES: Final = {"text": "the cat sat. the dog sat on the mat.", "answer": "the cat sat."}
TEMPLATE: Final = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if named %}dog {% endif %}{% if add_generation_prompt %}mat{% endif %}"
)


def of_words(model: Any, name: str) -> LoadedModel:
    """A model with a tokenizer that has a chat template."""
    words = tokenizer()
    words.chat_template = TEMPLATE
    return LoadedModel(name, model.requires_grad_(False), words, device())


def that_hears() -> LoadedModel:
    from tests.models.inputs.sounds.small_sounds import loaded

    return loaded("wav2vec2")


@cache
def image(shade: int = 0) -> dict[str, Any]:
    return small_encoders.sent(small_encoders.noise() + shade)


@cache
def sound(seed: int = 0) -> dict[str, Any]:
    from tests.models.inputs.sounds.small_sounds import sent, speech

    return dict(sent(speech(1.0, seed=seed)))


class Kind(NamedTuple):
    """A kind of models."""

    load: Callable[[], LoadedModel]
    sent: Callable[[], Fields] = lambda: TEXT
    """An input."""


KINDS: Final[dict[str, Kind]] = {
    "causal": Kind(lambda: of_words(built("qwen3"), "qwen3")),
    "masked": Kind(lambda: classifier("bert", "ForMaskedLM")),
    "classifier": Kind(lambda: classifier("bert", "ForSequenceClassification")),
    "token classifier": Kind(lambda: classifier("bert", "ForTokenClassification")),
    "encoder": Kind(lambda: classifier("bert", "Model"), lambda: TEXT | {"return": ["hidden"]}),
    "encoder and decoder": Kind(lambda: small("t5"), lambda: TEXT | {"target": "the dog sat"}),
    "vision": Kind(lambda: small_encoders.loaded("vit"), lambda: {"images": [image()]}),
    "speech": Kind(that_hears, lambda: {"audio": [sound()]}),
    "hybrid": Kind(
        lambda: of_words(
            built("qwen3_next", num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2),
            "qwen3_next",
        )
    ),
    "state space": Kind(lambda: of_words(built("mamba2"), "mamba2")),
}


@dataclass(frozen=True)
class Case:
    """A value of a field, and the request that it changes."""

    value: Any
    """Or a function of the first layer of a model."""
    beside: Fields = field(default_factory=dict)
    """The fields without which it has no meaning; None for one that is left out."""
    changes: str = "causal"
    """A kind of models of which it must change the answer."""


def edits(layer: str) -> dict[str, Any]:
    return {layer: [{"tap": "weights", "heads": [0], "queries": [0], "keys": [0], "set": 0.5}]}


def listed(layer: str) -> list[Any]:
    return [int(layer) if layer.isdigit() else layer]


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


CHAT: Final = {"text": None, "messages": said("the cat sat")}
INPUTS: Final = {
    "text": Case(OTHER),
    "text_pair": Case("the dog", changes="classifier"),
    "tokens": Case([5, 3, 7], {"text": None, "tokens": [3, 5, 7]}),
    "token_type_ids": Case([0, 0, 1], {"text": None, "tokens": [3, 5, 7]}, "masked"),
    "messages": Case(said(OTHER), CHAT),
    "chat_template_kwargs": Case({"named": True}, CHAT),
    "add_generation_prompt": Case(False, CHAT),
    "continue_final_message": Case(True, CHAT),
    "answer": Case(" sat"),
    "target": Case("the cat", changes="encoder and decoder"),
    "images": Case([image(40)], changes="vision"),
    "audio": Case(lambda _: [sound(1)], changes="speech"),
    "layers": Case(listed),
    "edits": Case(edits),
}
"""The fields of every input."""
SQUARE: Final = {"width": 32, "height": 32}
SWEEP: Final = {"tap": "context", "over": ["heads"], "set": 0}
PATHS: Final = {"sweep": None, "from": {"parts": ["heads"], "text": OTHER}}


NO_FIELDS: Final[Fields] = {}


class Question(NamedTuple):
    """A question to a whole model."""

    request: type[WireModel]
    cases: Mapping[str, Case | tuple[Case, ...]]
    fixed: Fields = NO_FIELDS
    """Fields of each request."""
    takes_input: bool = True


QUESTIONS: Final[dict[str, Question]] = {
    "forward": Question(ModelForwardRequest, INPUTS | {
        "layers": (Case(listed, {"return": ["weights"]}), Case(listed, {"return": ["hidden"]})),
        "return": (Case(["weights"]), Case(["logits"])),
        "select": Case({"heads": [0]}, {"return": ["weights"]}), "top_k": Case(2),
        "positions": (Case([0]), Case([[0]])),
        "average_heads": Case(True, {"return": ["weights"]}), "compare": Case("unedited"), "keep": Case(True),
        "likelihood": Case("masked", changes="masked"),
    }),
    "weights": Question(ModelWeightsRequest, INPUTS | {
        "top_k": Case(2), "pool": Case(2), "return_weights": Case(False), "average_heads": Case(True),
        "select": (
            Case({"heads": [0]}), Case({"keys": [1]}), Case({"queries": [1]}, {"return_weights": False, "pool": 2}),
        ),
        "statistics": (Case(["entropy"]), Case(["received"])),
        "statistic_options": (
            Case({"window": 1}, {"statistics": ["locality"]}),
            Case({"pairs": [[1, 1]]}, {"statistics": ["pairs"], "statistic_options": {"pairs": [[1, 0]]}}),
        ),
        "normalize": (Case("absolute", changes="state space"), Case("apc", {"statistics": ["max_weight"]})),
        "compare": Case("unedited"), "keep": Case(True),
    }, {"layers": "all"}),
    "gradients": Question(ModelGradientsRequest, INPUTS | {
        "of": Case({"token": 5, "position": 1}), "wrt": (Case(["hidden"]), Case(["weights"])),
        "select": Case({"heads": [0]}, {"wrt": ["weights"]}), "by_head": Case(False),
        "integrated": (Case(3), Case({"steps": 3, "rule": "midpoint"}), Case({"steps": 3, "baseline": "mean"})),
        "check": Case(True),
    }),
    "effects": Question(ModelEffectsRequest, INPUTS | {
        "sweep": Case(SWEEP | {"set": 1}), "from": Case(PATHS["from"] | {"parts": ["mlps"]}, PATHS),
        "to": Case({"parts": ["q"]}, PATHS), "of": Case({"token": 5, "position": 1}),
    }, {"sweep": SWEEP}),
    "lens": Question(ModelLensRequest, INPUTS | {
        "of": Case(["output"]), "positions": Case([0]), "top_k": Case(1), "targets": Case([3]),
    }),
    "context": Question(ContextRequest, {
        "text": Case("the cat sat. the dog sat."),
        "messages": Case(said("the cat. the mat"), {"text": None, "messages": said("the cat sat. the dog")}),
        "chat_template_kwargs": Case({"named": True}, {"text": None, "messages": said("the cat sat. the dog")}),
        "sources": Case([{"text": "the cat"}, {"text": "the dog"}]),
        "split": Case("messages", {"text": None, "messages": said("the cat sat. the dog")}),
        "answer": Case("the dog."), "return": tuple(map(Case, (["removed"], ["attention"], ["gradient"]))),
        "heads": Case(1),
    }, SENTENCES, takes_input=False),
    "similarity": Question(TextSimilarityRequest, {
        "gradients": Case(False), "pooling": Case("max"),
    }, {"pairs": [["the cat", "the dog on"]]}, takes_input=False),
    "complexity": Question(ModelComplexityRequest, {
        "images": Case([SQUARE] * 2, {"length": None, "images": [SQUARE]}, "vision"),
        "length": Case(20), "target_length": Case(3, changes="encoder and decoder"), "batch": Case(2),
        "new_tokens": Case(4), "weights": Case(True), "lens": Case(["hidden"]),
        "fit": Case(True), "vector": Case({"layers": [0]}),
        "probe": Case({"of": {"point": "hidden", "layer": "all"}}), "likelihood": Case("masked", changes="masked"),
        "sweep": Case(SWEEP), "from": Case({"parts": ["heads"], "text": "the dog"}),
        "to": Case({"parts": ["q"]}, {"from": {"parts": ["heads"], "text": "the dog"}}),
        "text": Case("the cat sat. the dog sat.", SENTENCES | {"length": None}),
        "sources": Case([{"text": "the cat"}, {"text": "the dog"}, {"text": "the mat"}], SENTENCES | {"length": None}),
        "messages": Case(said("the cat. the mat"), {"length": None, "messages": said("the cat sat. the dog sat")}),
        "chat_template_kwargs": Case({"named": True}, {"length": None, "messages": said("the cat sat. the dog")}),
        "split": Case("messages", {"length": None, "messages": said("the cat sat. the dog")}),
        "answer": Case("the dog.", SENTENCES | {"length": None}),
        "return": Case(["removed"], SENTENCES | {"length": None}),
        "max_tokens": Case(2, SENTENCES | {"length": None, "answer": None}),
    }, {"length": 16}, takes_input=False),
}  # fmt: skip
ELSEWHERE: Final = {
    "watch": "tests/models/server/test_probe_requests.py",
    "adapter": "tests/models/server/test_adapters.py", "lens": "tests/models/server/test_lens_requests.py",
    "kind": "tests/models/server/test_lens_requests.py", "mask_seed": "tests/models/inputs/images/test_encoders.py",
    "prompt_names": "tests/models/answers/embeddings/test_vector_similarity.py",
    "max_tokens": "tests/models/server/test_contexts.py", "temperature": "tests/models/server/test_contexts.py",
} | dict.fromkeys(DrawOptions.model_fields, "tests/models/generation")  # fmt: skip
"""Fields that need files, an adapter or a generation, and the tests that they have."""
WITHOUT_EFFECT: Final = {
    "alone": "no pass", "encoding": "JSON reply",
    ("weights", "labels"): "in a picture", ("weights", "query_labels"): "in a picture",
    ("effects", "labels"): "in a picture", ("lens", "labels"): "in a picture",
    ("complexity", "heads"): "no cost", ("complexity", "temperature"): "no cost",
}  # fmt: skip
"""Fields that change no answer of one caller alone, and words of what the contract says of them."""


def names(request: type[WireModel]) -> set[str]:
    """The optional fields of a request, as the wire has them."""
    return {about.alias or name for name, about in request.model_fields.items() if not about.is_required()}


def cases() -> Iterator[tuple[str, str, Case]]:
    """Yield every case: its question, its field and the case."""
    for name, question in QUESTIONS.items():
        for field_name, given in question.cases.items():
            for case in given if isinstance(given, tuple) else (given,):
                yield name, field_name, case
