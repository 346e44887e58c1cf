"""One class for each fault: its code, its status, and the same class again after a trip over HTTP."""

import inspect
import json
import pickle
import re

import pytest

from attention_contract import errors
from attention_contract.errors import AttentionError, error_classes, from_problem

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, AttentionError)]
STATUSES = {400, 401, 403, 404, 405, 406, 408, 409, 410, 413, 415, 421, 422, 429, 431, 499, 500, 503, 507}


def test_codes_are_unique_and_every_class_has_its_own():
    assert len(error_classes()) == len(CLASSES)
    assert all("code" in vars(error) and "title" in vars(error) for error in CLASSES)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in error_classes())


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_a_status_is_of_the_designs_list_and_inherited(error):
    assert error.status in STATUSES
    parent = error.__base__
    if parent not in {AttentionError, Exception}:
        assert error.status == parent.status
        assert "status" not in vars(error)


def test_only_what_passes_says_when_to_come_back():
    assert {error.status for error in CLASSES if error.retry_after is not None} == {429, 503}
    assert all(error.retry_after for error in CLASSES if error.status in {429, 503})


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_an_error_survives_http(error):
    raised = error("say what", param="edits.0.value", request_id="r1", expected=[1, 2], limit=3, self=4, detail=5)
    problem = json.loads(json.dumps(raised.to_problem()))
    assert problem["status"] == error.status
    assert problem["type"].endswith(error.code)
    again = from_problem(error.status, problem)
    assert type(again) is error
    assert (str(again), again.detail, again.param, again.request_id) == ("say what", "say what", "edits.0.value", "r1")
    assert again.facts == {"expected": [1, 2], "limit": 3, "self": 4}


def test_facts_cannot_pass_for_members_of_the_problem():
    problem = errors.InvalidRequest("x", status=200, code="fine", title="t", type="u").to_problem()
    assert (problem["status"], problem["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("status", sorted(STATUSES - {500}))
def test_an_unknown_code_gives_the_class_of_its_status(status):
    error = from_problem(status, {"code": "from_the_future", "detail": "new"})
    assert error.status == status
    assert type(error).__base__ is AttentionError


@pytest.mark.parametrize(
    "problem",
    [{}, {"title": "t"}, {"detail": None}, {"detail": 3}, {"code": ["x"]}, {"args": 1}, {"self": 1, "name": 2}],
    ids=str,
)
def test_any_document_gives_an_error(problem):
    for status in (418, 422, 500, 502, 503):
        error = from_problem(status, problem)
        assert error.detail
        assert error.status in STATUSES


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(errors.ShapeMismatch("x", param="key", expected=[1])))  # noqa: S301
    assert (type(error), error.detail, error.param, error.facts) == (
        errors.ShapeMismatch, "x", "key", {"expected": [1]},
    )  # fmt: skip
