"""Fields that change nothing of an answer are refused by name, before anything runs."""

from functools import partial

import pytest
from pydantic import ValidationError
from tests.models.answers.small_classifiers import loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.model_requests import (
    ModelForwardRequest,
    ModelGradientsRequest,
    ModelWeightsRequest,
)
from attention_service.models.loaded.checked_request import check_request, read_request

REFUSING = {
    ("bert", "ForMaskedLM"): "expected as many tokens as the text has mask tokens, 0; got 1|changes nothing here",
    ("bert", "ForTokenClassification"): "does not predict the tokens of an answer",
    ("bert", "ForSequenceClassification"): "does not predict the tokens of an answer",
    ("bert", "Model"): "does not predict the tokens of an answer",
    ("llama", "ForSequenceClassification"): "does not predict the tokens of an answer",
    ("bart", "ForConditionalGeneration"): "send the answer as target",
    ("llama", "ForCausalLM"): None,
}
"""Heads, and the reason for which they refuse an answer; None for those that predict it."""
OF = {"position": -1, "token": 3}
SWEEP = {"tap": "context", "over": ["heads"], "set": 0}
QUESTIONS = {
    "forward": ModelForwardRequest, "weights": ModelWeightsRequest, "lens": ModelLensRequest,
    "gradients": partial(ModelGradientsRequest, of=OF), "effects": partial(ModelEffectsRequest, of=OF, sweep=SWEEP),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("head", REFUSING, ids="-".join)
def test_an_answer_is_refused_by_each_model_that_predicts_none(head, question):
    model, asking = loaded(*head), QUESTIONS[question]
    read = check_request if question in {"lens", "effects"} else read_request
    assert read(model, asking(text="the cat sat"))
    given = asking(text="the cat", answer=" sat")
    if (reason := REFUSING[head]) is None:
        assert read(model, given).inputs.answers[0]
        return
    with pytest.raises(InvalidRequest, match=reason) as refused:
        read(model, given)
    assert refused.value.param == "answer"


@pytest.mark.parametrize("returned", [[], ["logits"], ["hidden", "output", "pooled"]])
def test_what_narrows_taps_is_refused_where_none_is_returned(returned):
    with pytest.raises(ValidationError, match="it narrows taps of attentions"):
        ModelForwardRequest.model_validate({"text": "a", "return": returned, "select": {"heads": [0]}})
    with pytest.raises(ValidationError, match="it averages returned weights"):
        ModelForwardRequest.model_validate({"text": "a", "return": returned, "average_heads": True})
    given = {"return": [*returned, "weights"], "select": {"heads": [0]}, "average_heads": True}
    assert ModelForwardRequest.model_validate({"text": "a"} | given)
