"""A list of positions for each text: the predictions, logits and readings are those of each text asked by itself."""

import numpy as np
import pytest
from pydantic import ValidationError
from tests.models.answers.small_classifiers import loaded as classifier
from tests.models.small_models import loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.streams.stream_search import find_stream

TEXTS = [[3, 4, 5, 6], [8, 3, 7, 9, 10, 3], [6, 5]]
POSITIONS = [[-1, 0], [2, -2], [1, 0]]
MODELS = {
    "a decoder": lambda: loaded("llama"),
    "a masked model": lambda: classifier("bert", "ForMaskedLM"),
    "a token classifier": lambda: classifier("bert", "ForTokenClassification"),
}


def forward(model, **fields):
    return forward_reply(model, validate(ModelForwardRequest, fields))


def lens(model, **fields):
    plan = plan_lens(model, validate(ModelLensRequest, fields), find_stream(model))
    return at_once(LensRun(model, plan).parts())


def missing(model, text):
    """The tokens by which a text is filled up at the left, as those of a decoder are."""
    return max(map(len, TEXTS)) - len(TEXTS[text]) if model.reader.pads_left else 0


@pytest.mark.parametrize("kind", MODELS)
def test_predictions_and_logits_are_those_of_each_text_alone(kind):
    model = MODELS[kind]()
    reply = forward(model, tokens=TEXTS, positions=POSITIONS, top_k=2, **{"return": ["logits"]})
    shown = iter(reply.predictions)
    for text, ids in enumerate(TEXTS):
        alone = forward(model, tokens=ids, positions=POSITIONS[text], top_k=2, **{"return": ["logits"]})
        np.testing.assert_allclose(reply.logits[text], alone.logits, atol=1e-4)
        for expected in alone.predictions:
            prediction = next(shown)
            assert prediction.text == text
            assert prediction.position == expected.position + missing(model, text)
            assert [token.id for token in prediction.top] == [token.id for token in expected.top]


@pytest.mark.parametrize("kind", ["a decoder", "a masked model"])
def test_a_lens_reads_the_positions_of_each_text(kind):
    model = MODELS[kind]()
    reply = lens(model, tokens=TEXTS, positions=POSITIONS, targets=[5], layers=[1])
    for text, ids in enumerate(TEXTS):
        alone = lens(model, tokens=ids, positions=POSITIONS[text], targets=[5], layers=[1])
        np.testing.assert_allclose(reply.layers[0].hidden.targets[text], alone.layers[0].hidden.targets, atol=1e-4)
        assert [at - missing(model, text) for at in reply.positions[text]] == [*alone.positions]


@pytest.mark.parametrize(
    ("positions", "param"),
    [([[0, 1], [0, 1]], "positions"), ([[0], [6], [0]], "positions.1.0"), ([[0], [0], [-3]], "positions.2.0")],
)
def test_what_does_not_fit_the_texts_is_refused_by_its_place(positions, param):
    for ask in (forward, lens):
        with pytest.raises(InvalidRequest) as refusal:
            ask(classifier("bert", "ForMaskedLM"), tokens=TEXTS, positions=positions)
        assert refusal.value.param == param


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValidationError, match="as many positions for each text; got 1 and 2"):
        ModelForwardRequest.model_validate({"tokens": TEXTS, "positions": [[0], [0, 1], [0]]})
    with pytest.raises(ValidationError, match="at most 16384"):
        ModelForwardRequest.model_validate({"tokens": [[3]] * 64, "positions": [[0] * 64] * 64})
