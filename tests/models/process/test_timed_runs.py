"""Times of a model's requests beside their predictions, by a clock that the test moves."""

import math
from collections.abc import Generator

import pytest
from tests.models.small_models import loaded

from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.wire import JSON, to_body
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import ModelPace
from attention_service.models.costs.question_stages import Stage
from attention_service.models.process import served_model, timed_runs
from attention_service.models.process.finite_answers import end_of
from attention_service.models.process.served import Answer
from attention_service.models.process.served_model import ServedModel
from attention_service.models.process.timed_runs import TimedRuns

IDS = [5, 6, 7, 8, 9]
QUESTIONS = {
    "forward": ModelForwardRequest(tokens=IDS),
    "weights": ModelWeightsRequest(tokens=IDS),
    "gradients": ModelGradientsRequest.model_validate({"tokens": IDS, "of": {"position": -1}}),
}


class Clock:
    """A clock that goes on by ``step`` seconds with every look."""

    now, step = 0.0, 1.0

    def perf_counter(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (timed_runs, served_model):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def model(monkeypatch):
    model = ServedModel(loaded("llama"))
    monkeypatch.setattr(model.loaded, "check_files", lambda: None)
    return model


def prepared(model, operation, request):
    facts = {"free_bytes": 2**30, "reader": "", "adapter": None}
    body = memoryview(b"".join(to_body(request, JSON, "request", "base64")))
    return model.prepare(operation, body, facts, lambda _: None)


@pytest.mark.parametrize(("before", "behind"), [(3.0, 1.0), (1.0, 3.0)])
def test_predictions_follow_programs_that_end_or_begin_beside(before, behind):
    pace, off = ModelPace(), []
    for run in range(40):
        predicted_ms, took_ms = [(2.0, 4.0), (6.0, 18.0)][run % 2]
        took_ms *= before if run < 20 else behind
        if run >= 28:
            off.append(pace.estimate("forward", predicted_ms).median / took_ms)
        pace.note("forward", predicted_ms, took_ms)
    assert all(0.7 < each < 1.4 for each in off)


@pytest.mark.parametrize("ratio", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_ten_runs_bring_the_median_of_every_kind_to_what_they_took(ratio, spread):
    pace = ModelPace()
    for kind, factor in (("forward", ratio), ("weights", 5 * ratio)):
        for number in range(10):
            predicted = 10.0 if number % 2 else 200.0
            pace.note(kind, predicted, predicted * factor * spread ** (number // 2 % 3 - 1))
        for predicted in (10.0, 200.0):
            found = pace.estimate(kind, predicted)
            assert 0.7 < found.median / (predicted * factor) < 1.4
            assert found.low < found.median < found.high
            assert found.low < predicted * factor < found.high


def test_a_kind_that_did_not_run_has_the_factor_of_the_others_and_an_interval_before_any():
    pace = ModelPace()
    first = pace.estimate("forward", 9.0)
    assert (first.low, first.median, first.high) == pytest.approx((3.0, 9.0, 27.0))
    for _ in range(10):
        pace.note("weights", 1.0, 4.0)
    assert pace.estimate("forward", 9.0).median == pytest.approx(36.0)
    assert pace.estimate("forward", 0.0).high == 0.0


def test_a_request_in_parts_learns_from_each(clock):
    def answer():
        yield 3
        yield 1
        return "done"

    costs = ModelCosts(loaded("llama"))
    stage = Stage(1, 600)
    each_ms = costs.work(stage).ms
    told = at_once(TimedRuns(costs, stage, "effects").parts(answer(), 2))
    assert told.reply == "done"
    assert told.time.predicted.median == pytest.approx(each_ms * (2 + 3 + 1))
    assert told.time.measured_ms == 3000.0
    for _ in range(2):
        at_once(TimedRuns(costs, stage, "effects").parts(answer(), 2))
    assert costs.pace.estimate("effects", each_ms).median > 2 * each_ms


def test_each_part_announces_the_time_of_the_next_one():
    def answer():
        yield 3
        yield 1
        return "done"

    costs, stage = ModelCosts(loaded("llama")), Stage(1, 600)
    runs = TimedRuns(costs, stage, None)
    assert [*runs.parts(answer(), 2)] == pytest.approx([3 * costs.seconds(stage), costs.seconds(stage)])
    before = costs.seconds(stage)
    assert before > costs.work(stage).ms / 1e3
    for _ in range(5):
        costs.pace.note("effects", 1.0, 20.0)  # a machine that is busy
    assert TimedRuns(costs, stage, "effects").seconds(1) == pytest.approx(20 * before, rel=0.1)


def test_a_request_of_several_passes_tells_their_sum(clock):
    costs, stage = ModelCosts(loaded("llama")), Stage(1, 600)
    runs, further = TimedRuns(costs, stage, "effects"), object()
    assert runs.run(lambda: further, 5) is further
    runs.run(Answer, 7)
    [answer] = runs.told([Answer()])
    assert answer.time.predicted.median == pytest.approx(12 * costs.work(stage).ms)
    assert (answer.time.purpose, answer.time.measured_ms) == ("effects", 2000.0)


@pytest.mark.parametrize("operation", QUESTIONS)
def test_questions_learn_from_what_ran_and_tell_their_interval(model, clock, operation):
    found = [prepared(model, operation, QUESTIONS[operation]).run() for _ in range(11)]  # a second each
    answers = [at_once(each) if isinstance(each, Generator) else each for each in found]
    first, last = (answers[at].reply.ran for at in (0, -1))
    assert first.predicted_ms < 500
    took_ms = answers[-1].time.measured_ms
    assert took_ms in {1000.0, 2000.0}  # gradients are parts
    assert last.predicted_ms == pytest.approx(took_ms)
    assert last.predicted_low_ms < last.predicted_ms < last.predicted_high_ms
    assert answers[-1].time.facts() == {
        "purpose": operation, "measured_ms": took_ms,
        "predicted_ms": (last.predicted_ms, last.predicted_low_ms, last.predicted_high_ms),
    }  # fmt: skip
    if operation != "gradients":
        asked = ModelComplexityRequest(length=len(IDS), weights=operation == "weights")
        price = end_of(prepared(model, "complexity", asked)).reply.prefill
        assert price.predicted_ms == pytest.approx(1000.0)
        assert price.predicted_low_ms < 1000.0 < price.predicted_high_ms


def test_a_shared_pass_is_told_once_and_in_every_reply(model, clock):
    questions = [prepared(model, "forward", QUESTIONS["forward"]).question for _ in range(3)]
    answers = model.answer_joined(questions)
    assert [each.time is None for each in answers] == [False, True, True]
    assert len({each.reply.ran.predicted_ms for each in answers}) == 1
    assert answers[0].reply.ran.predicted_ms > 0


def test_a_generation_learns_its_prompt_and_its_tokens_apart(model, clock):
    request = CompletionRequest(model="llama", prompt=IDS, max_tokens=4, temperature=0)
    for _ in range(6):
        generation = prepared(model, "complete", request).run()
        clock.step = 3.0
        model.read([generation], 512)
        clock.step = 1.0
        while not generation.has_ended:
            model.step([generation])
        answer = model.finish(generation)
    assert answer.time.measured_ms == pytest.approx(3000 + 3 * 1000)
    assert answer.time.predicted.median == pytest.approx(6000.0)
    ran = answer.last[-1]["ran"]
    assert (ran["compute_ms"], ran["predicted_ms"]) == pytest.approx((6000.0, 6000.0))
    asked = ModelComplexityRequest(length=len(IDS), new_tokens=3)
    price = end_of(prepared(model, "complexity", asked)).reply
    assert price.total_ms == pytest.approx(6000.0, rel=0.1)
    assert price.total_low_ms < price.total_ms < price.total_high_ms < math.inf


def test_steps_that_others_had_too_are_nobodys_time(model, clock):
    request = CompletionRequest(model="llama", prompt=IDS, max_tokens=2, temperature=0)
    both = [prepared(model, "complete", request).run() for _ in range(2)]
    model.read(both, 512)
    while not all(each.has_ended for each in both):
        model.step([each for each in both if not each.has_ended])
    answer = model.finish(both[0])
    assert answer.time is None
    assert "predicted_ms" not in answer.last[-1]["ran"]
