"""Messages of a stream: each form is read as what it is, and a fault names its session."""

import json

import numpy as np
import pytest

from attention_contract import wire
from attention_contract.errors import AttentionError, InvalidRequest, SessionGone, Unreadable, from_problem
from attention_contract.frames import problem_of, reply_from_frame, request_from_frame, to_frame
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.sessions import (
    SessionStep,
    StepProblem,
    StepReply,
    StepsReply,
    StepsRequest,
)

X = np.arange(8, dtype=np.float16).reshape(1, 2, 4)
RAN = Ran(
    kernel="in_place", device="cpu", dtype="float16", flops=1, predicted_ms=1, predicted_low_ms=1, predicted_high_ms=1,
    compute_ms=float("inf"), cpu_ms=1, queue_ms=0, batch=1, peak_bytes=1,
)  # fmt: skip
GONE = SessionGone("it is gone", reason="evicted", request_id="r1")


def step(session="7-1", **fields):
    return SessionStep(session=session, query=X, **fields)


@pytest.mark.parametrize("text", [False, True])
def test_a_request_is_one_step_or_many(text):
    single = step(at=3, step="a", edits=[{"tap": "v", "value": X}])
    one = request_from_frame(to_frame(single, text=text, entry="request", encoding="base64"))
    assert (type(one), one.session, one.at, one.step) == (SessionStep, "7-1", 3, "a")
    many = StepsRequest(steps=[step(), step("7-2")])
    read = request_from_frame(to_frame(many, text=text, entry="request", encoding="base64"))
    assert [each.session for each in read.steps] == ["7-1", "7-2"]
    for array in (one.query, one.edits[0].value, read.steps[1].query):
        assert array.dtype == X.dtype
        np.testing.assert_array_equal(array, X)


@pytest.mark.parametrize("text", [False, True])
def test_a_reply_is_that_of_a_step_or_of_many_or_a_problem(text):
    reply = StepReply(session="7-1", length=2, output=X, ran=RAN)
    problem = problem_of(GONE, "7-2")
    for value in (reply, problem, StepsReply(steps=[reply, problem])):
        read = reply_from_frame(to_frame(value, text=text, entry="reply", encoding="base64"))
        assert type(read) is type(value)
        results = read.steps if isinstance(read, StepsReply) else [read]
        for result in results:
            if isinstance(result, StepProblem):
                error = from_problem(result.status, result.model_dump())
                assert (type(error), error.facts["reason"], error.request_id) == (SessionGone, "evicted", "r1")
            else:
                np.testing.assert_array_equal(result.output, X)
                assert result.ran.compute_ms == float("inf")


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
def test_results_of_many_steps_survive_a_body_with_their_facts(media_type):
    reply = StepsReply(steps=[problem_of(GONE, "7-2"), StepReply(session="7-1", length=2, output=X, ran=RAN)])
    body = b"".join(wire.to_body(reply, media_type, "reply", "base64"))
    read = wire.from_body(StepsReply, body, media_type, "reply")
    assert read.steps[0].model_dump() == reply.steps[0].model_dump()
    np.testing.assert_array_equal(read.steps[1].output, X)


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ('{"session": "7-1", "query": [[1, [2]]]}', "query"),
        ('{"session": "7-1", "query": [[1.0]], "past_key": [[1.0]]}', "past_key"),
        ('{"session": "7-1", "query": [[1.0]], "offsets": 3}', "offsets"),
        ('{"session": "7-1", "query": [[1.0]], "at": -1}', "at"),
        ('{"session": "7-1"}', "query"),
    ],
)
def test_a_fault_names_the_field_and_the_session(frame, param):
    with pytest.raises(InvalidRequest) as caught:
        request_from_frame(frame)
    assert (caught.value.param, problem_of(caught.value, None).session) == (param, "7-1")


@pytest.mark.parametrize("frame", ["", "[]", "{", b"", b"\0" * 8, b"\1" * 20, '{"session": "x"' + "[" * 999])
def test_what_is_no_message_is_unreadable(frame):
    with pytest.raises(Unreadable):
        request_from_frame(frame)


def test_a_session_stands_once_among_many_steps():
    frame = json.dumps({"steps": [{"session": "7-1", "query": [[1.0]]}] * 2})
    with pytest.raises(InvalidRequest, match="twice") as caught:
        request_from_frame(frame)
    assert caught.value.param == "steps"
    with pytest.raises(InvalidRequest) as caught:
        request_from_frame('{"steps": [{"session": "7-1", "query": [[1.0]]}, {"session": "7-2", "query": "no"}]}')
    assert caught.value.param == "steps.1.query"


def test_errors_without_a_session_stay_without():
    with pytest.raises(AttentionError) as caught:
        request_from_frame('{"query": [[1.0]]}')
    assert problem_of(caught.value, None).session is None
