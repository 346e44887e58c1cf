"""Every optional field of every request to a whole model changes the answer, or is refused by its name.

Each is tried of models of every kind; what changes no answer says so in the contract.
"""

from functools import cache

import orjson
import pytest
from tests.models.answers.field_cases import ELSEWHERE, KINDS, QUESTIONS, WITHOUT_EFFECT, cases, names

from attention_contract.descriptions import described
from attention_contract.errors import AttentionError
from attention_contract.wire import to_json
from attention_service.models.process.finite_answers import end_of
from attention_service.models.process.served_model import ServedModel

FACTS = {"free_bytes": 2**31, "reader": "", "lens": None}
NOT_COMPARED = {"ran", "model"}
"""Fields of replies with times."""
CASES = [*cases()]


@cache
def served(kind):
    if kind == "speech":
        pytest.importorskip("soundfile")
    return ServedModel(KINDS[kind].load())


def answered(kind, question, body):
    """The answer without times, as bytes, and True if it has a recording."""
    sent = {name: value for name, value in body.items() if value is not None}
    found = end_of(served(kind).prepare(question, memoryview(orjson.dumps(sent)), FACTS, lambda _: None))
    reply = orjson.loads(to_json(found.reply))
    return orjson.dumps({name: value for name, value in reply.items() if name not in NOT_COMPARED}), found.recording


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_optional_field_has_a_case(question):
    """A new field needs a case, or the words of the contract that say what it has no effect on."""
    tried = {*QUESTIONS[question].cases, *ELSEWHERE} | {each for each in WITHOUT_EFFECT if isinstance(each, str)}
    tried |= {each[1] for each in WITHOUT_EFFECT if each[0] == question}
    assert names(QUESTIONS[question].request) <= tried
    assert QUESTIONS[question].cases.keys() <= names(QUESTIONS[question].request)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("question", "name", "case"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_field_changes_the_answer_or_is_refused_by_name(question, name, case, kind):
    asked = QUESTIONS[question]
    model = served(kind).loaded
    first = str(next(iter([*model.places.values(), *model.all_places])).key)
    sent = dict(KINDS[kind].sent()) if asked.takes_input else {}
    if question != "forward":
        sent.pop("return", None)
    body = sent | asked.fixed | case.beside
    value = case.value(first) if callable(case.value) else case.value
    try:
        before = answered(kind, question, body)
    except AttentionError:  # such a model does not answer the question
        assert (kind, case.changes) != ("causal", "causal")
        return
    try:
        after, refused = answered(kind, question, body | {name: value}), None
    except AttentionError as fault:
        after, refused = None, fault
    if refused is None:
        assert after != before
        return
    given = {name, *KINDS[kind].sent()}  # of two inputs, either may be named
    assert (refused.to_problem().get("param") or "").partition(".")[0] in given, refused.detail
    assert refused.status == 422
    assert kind != case.changes


@pytest.mark.parametrize("name", WITHOUT_EFFECT, ids=str)
def test_the_contract_says_what_has_no_effect(name):
    words = WITHOUT_EFFECT[name]
    if isinstance(name, tuple):
        assert words in QUESTIONS[name[0]].request.__doc__
        return
    for question, asked in QUESTIONS.items():
        about = described(asked.request).get(name)
        assert about is None or words in about.description, question
