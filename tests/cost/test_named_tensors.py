"""The words of cost accounts: every tensor and every letter is explained, and no explanation is idle."""

import re

import pytest
from tests.cost.test_peaks import QUICK, able
from tests.cost.workloads import METHODS, forward_seen, gradients_seen

from attention_service.core.methods import approximation_of
from attention_service.core.registry import variants
from attention_service.runtime.operations.complexity.growth import LETTERS, explained
from attention_service.runtime.operations.complexity.shape_cost import TENSORS, named_tensors


@pytest.mark.sampled(name=5)
@pytest.mark.parametrize("name", QUICK)
def test_every_tensor_that_is_held_has_a_name_and_a_meaning(name):
    work = QUICK[name]
    for kernel in able(work):
        for found in (forward_seen(work, kernel), gradients_seen(work, kernel)):
            for held in found.phases.values():
                assert held.keys() <= TENSORS.keys()
                assert sum(named_tensors(held).values()) == sum(held.values())


def test_one_name_has_one_meaning_in_words():
    meanings = {name: {each.meaning for each in TENSORS.values() if each.name == name} for name, _ in TENSORS.values()}
    assert {len(each) for each in meanings.values()} == {1}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in meanings)


def test_tensors_of_one_name_are_added_up():
    assert named_tensors({"roles": 3, "q_k_v": 4, "scores": 5}) == {"q_k_v": 7, "scores": 5}


def letters(order):
    """Those that stand alone."""
    return {word for word in re.findall("[a-zA-Z]+", order) if len(word) == 1 and word.islower()}


def test_every_letter_of_an_order_is_explained():
    own = set()
    for spec in METHODS.values():
        method = approximation_of(spec)
        own |= {*method.letters()}
        for order in method.orders():
            assert explained(order, method.letters()).keys() == letters(order)
    used = {letter for entry in variants() for letter in letters(entry.cost)}
    assert used - {"a"} <= set(LETTERS) | own  # a, as in "a pair", is a word
