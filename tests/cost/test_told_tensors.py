"""What accounts of cost are told in: every tensor and every letter is explained, and no explanation is idle."""

import ast
import re
from pathlib import Path

import pytest
from tests.cost.test_traffic import METHODS as EVERY_METHOD

import attention_service
from attention_service.core.methods import approximation_of
from attention_service.core.registry import variants
from attention_service.core.stages import TAPS
from attention_service.cost.letters import LETTERS, explained
from attention_service.cost.memory_phases import Phase
from attention_service.cost.tensor_names import TENSORS, told

SOURCES = sorted(Path(attention_service.__file__).parent.rglob("*.py"))


def held_names(source):
    """Yield the names under which a rehearsal holds the tensors of this module's passes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in {"phase", "Phase"}:  # the name of the phase comes first
            yield from (name.value for name in ast.walk(node.args[1]) if isinstance(name, ast.Constant))
            yield from (name.value for name in node.args[2:] if isinstance(name, ast.Constant))
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "account.call":
            yield from (name.value for name in node.args if isinstance(name, ast.Constant))


def test_every_tensor_that_is_held_has_a_name_and_a_meaning():
    found = {name for path in SOURCES for name in held_names(path.read_text("utf-8"))}
    stages = {*TAPS} - {"k", "v"}  # each is called as its tap
    assert found - {"select"} | stages | {"workspace"} == set(TENSORS)


def test_one_name_has_one_meaning_in_words():
    meanings = {name: {each.meaning for each in TENSORS.values() if each.name == name} for name, _ in TENSORS.values()}
    assert {len(each) for each in meanings.values()} == {1}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in meanings)


def test_what_has_one_name_is_added_up():
    phase = Phase("weights", {"roles": 3, "q_k_v": 4, "scores": 5})
    assert told(phase) == {"q_k_v": 7, "scores": 5}
    assert sum(told(phase).values()) == phase.bytes


def letters(order):
    """Those that stand alone."""
    return {word for word in re.findall("[a-zA-Z]+", order) if len(word) == 1 and word.islower()}


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_letter_of_a_methods_order_is_explained(name):
    spec = EVERY_METHOD[name]
    method = approximation_of(spec)
    for order in method.orders():
        assert explained(order, method.letters()).keys() == letters(order)


def test_letters_of_the_registries_are_explained():
    own = {letter for name in EVERY_METHOD for letter in approximation_of(EVERY_METHOD[name]).letters()}
    used = {letter for entry in variants() for letter in letters(entry.cost)}
    assert used - {"a"} <= set(LETTERS) | own  # a, as in "a pair", is a word
