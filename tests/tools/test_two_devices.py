"""Models over two processes answer what one process answers: the walk over some types, and over two left out."""

import json
import subprocess
import sys

import pytest
from tools.docs.snippets import ROOT
from tools.models_walk.two_devices import QUESTIONS, difference

pytestmark = pytest.mark.slow
KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mistral",
    "mixtral",
    "phi3",
    "olmo2",
    "cohere",
    "glm4",
)
LARGE = "gpt_oss", "deepseek_v3", "qwen3_moe", "granite", "t5gemma", "gemma3", "llama4_text"
NOT_TAKEN = "gemma3n_text", "doge"


def walked(*kinds):
    command = [sys.executable, "-m", "tools.models_walk.two_devices", *kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each.pop("kind"): each for each in found}


def test_each_type_answers_each_question_on_two_devices_as_on_one():
    found = walked(*KINDS, *LARGE)
    assert found.keys() == {*KINDS, *LARGE}
    for kind, answers in found.items():
        assert answers.keys() == QUESTIONS.keys(), (kind, answers)
        for question, error in answers.items():
            if not (isinstance(error, str) and error.startswith("refused: ")):  # by both, in the same words
                assert error < 1e-12, (kind, question, error)


def test_types_whose_plan_gives_other_numbers_are_found():
    for kind, answers in walked(*NOT_TAKEN).items():
        logits = answers["logits"]
        assert isinstance(logits, str) or logits > 1e-3, kind


def test_a_difference_is_the_largest_of_all_numbers_and_names_what_is_no_number():
    assert difference({"a": [1.0, 4.0], "b": "x"}, {"a": [1.0, 5.0], "b": "x"}) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"at \.b is y"):
        difference({"b": "y"}, {"b": "x"})
