"""Watched requests that share a pass, or whose texts are divided: each has the scores that it has alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.small_models import DECODERS, eager, loaded

from attention_contract.base import ABSENT
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.divided_questions import divided, may_divide
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.answers.model_weights import recorded_weights
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.streams.watched_probes import WatchedProbe

POINTS = "hidden", "mlp", "output"
QUESTIONS = {
    "forward": (ModelForwardRequest, {"top_k": 2}, recorded_forward),
    "weights": (ModelWeightsRequest, {"statistics": ["entropy"]}, recorded_weights),
}
"""The questions whose texts are watched: requests, their fields, and the answer to one alone."""


def probe(number, layer=1):
    """A probe of its own, of one of three points."""
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    point = POINTS[number % len(POINTS)]
    return WatchedProbe(f"{number:032x}", layer, point, drawn / drawn.norm(), 0.1 * number, None, False)


def question(model, number, kind="forward"):
    """A request of one text or of two, watched by up to two probes of 16, or by none."""
    texts = [[3 + (5 * number + 3 * text + at) % 9 for at in range(3 + number % 4)] for text in range(1 + number % 2)]
    schema, fields, _ = QUESTIONS[kind]
    request = validate(schema, {"tokens": texts if number % 2 else texts[0]} | fields)
    probes = [probe(each) for each in range(number, number + number % 3)]
    return request, replace(check_request(model, request), watch=probes)


def finished(parts):
    """The result of a generator."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("kind", QUESTIONS)
@pytest.mark.parametrize("family", DECODERS)
def test_sixteen_watched_requests_share_a_pass_and_have_their_scores_alone(family, kind):
    model = loaded(family)
    questions = [question(model, number, kind) for number in range(16)]
    assert len({group_of(model, *each) for each in questions}) == 1
    assert group_of(model, *questions[0]) is not None
    for (request, checked), found in zip(questions, joined_replies(model, questions), strict=True):
        expected = QUESTIONS[kind][2](model, request, checked).reply
        assert found.ran.joined == 16
        if not checked.watch:
            assert found.watched is ABSENT
            continue
        assert [each.probe for each in found.watched] == [each.id for each in checked.watch]
        for ours, alone in zip(found.watched, expected.watched, strict=True):
            np.testing.assert_allclose(ours.scores, alone.scores, atol=1e-5, rtol=1e-6)


def test_the_scores_are_those_of_transformers_states():
    model, (request, checked) = loaded("llama"), question(loaded("llama"), 2)
    states, other = [], question(loaded("llama"), 5)
    hook = eager("llama").model.layers[1].mlp.register_forward_hook(lambda _, __, output: states.append(output[0]))
    with torch.no_grad():
        eager("llama")(torch.tensor([request.tokens]))
    hook.remove()
    watch = [replace(checked.watch[0], name="mlp")]
    reply, _ = joined_replies(model, [(request, replace(checked, watch=watch)), other])
    expected = states[0].double() @ watch[0].weights + watch[0].bias
    np.testing.assert_allclose(reply.watched[0].scores, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", QUESTIONS)
def test_the_texts_of_a_watched_request_are_answered_some_at_a_time(kind):
    model, (schema, _, answer) = loaded("llama"), QUESTIONS[kind]
    texts = [[3 + (7 * text + at) % 9 for at in range(3 + text)] for text in range(5)]
    request = validate(schema, {"tokens": texts})
    checked = replace(check_request(model, request), watch=[probe(0), probe(1)])
    assert may_divide(model, request, checked)
    parts = divided(model, request, checked, 2, answer)
    watched = finished(parts).watched
    whole = answer(model, request, checked).reply
    assert len(watched) == 2
    for ours, alone in zip(watched, whole.watched, strict=True):
        np.testing.assert_allclose(ours.scores, alone.scores, atol=1e-5, rtol=1e-6)
