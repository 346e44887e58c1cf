"""Positions are counted within each text of a batch, whatever fills it up and at which side."""

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.models.answers.lenses.test_lens_readings import served
from tests.models.small_models import device, loaded, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.loaded_model import LoadedModel

TEXTS = [[5, 3, 7, 8, 6, 4], [3, 4, 5], [9, 6, 3, 10]]
POSITIONS = [0, 2, -1, -3]


def lens(family, tokens, **fields):
    model, stream = served(family)
    request = ModelLensRequest(**{"tokens": tokens, "of": ["hidden", "output"], "targets": [3, 8], "top_k": 0} | fields)
    return LensRun(model, plan_lens(model, request, stream)).reply()


def test_a_lens_reads_each_text_of_a_batch_as_alone():
    assert loaded("gpt2").reader.pads_left
    together = lens("gpt2", TEXTS, positions=POSITIONS)
    for row, text in enumerate(TEXTS):
        alone = lens("gpt2", text, positions=POSITIONS)
        assert [together.labels[row].ids[at] for at in together.positions[row]] == [text[at] for at in POSITIONS]
        for layer, own in zip(together.layers, alone.layers, strict=True):
            near(layer.hidden.targets[row], own.hidden.targets, 1e-4)
            near(layer.output.targets[row], own.output.targets, 1e-4)


@pytest.mark.parametrize(("family", "left"), [("gpt2", True), ("bert", False)])
def test_predictions_at_positions_are_those_of_each_text_alone(family, left):
    model = LoadedModel(family, built(family), tokenizer(), device())
    assert model.reader.pads_left is left

    def logits(tokens):
        return forward_reply(model, ModelForwardRequest(tokens=tokens, return_=["logits"], positions=POSITIONS)).logits

    for found, text in zip(logits(TEXTS), TEXTS, strict=True):
        near(found, np.asarray(logits(text)), 1e-4)


@pytest.mark.parametrize("position", [3, -4])
def test_a_position_that_the_shortest_text_lacks_is_refused_by_name(position):
    with pytest.raises(InvalidRequest, match="expected -3 to 2, the tokens of the shortest text") as refused:
        lens("gpt2", TEXTS, positions=[0, position])
    assert refused.value.param == "positions.1"
