"""A short walk of whole requests, and proof that it draws every registered entry and sees a wrong number."""

import random

import pytest
from tests import plain_attention
from tools.fuzz import drawn_requests
from tools.fuzz.request_walk import REQUESTS_OF_ONE, walk_situations

from attention_service.core.masks import MASKS
from attention_service.core.methods import METHODS
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES

DRAWN = [(SCORES, drawn_requests.SCORES), (MASKS, drawn_requests.MASKS), (POSITIONS, drawn_requests.POSITIONS),
         (NORMALIZERS, drawn_requests.NORMALIZERS), (METHODS, drawn_requests.METHODS)]  # fmt: skip


@pytest.mark.parametrize(("registry", "drawn"), DRAWN)
def test_every_registered_entry_is_drawn(registry, drawn):
    assert {entry.name for entry in registry} == set(drawn)
    assert all(options(random.Random(0)) is not None for options in drawn.values())


@pytest.mark.parametrize("situations", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_whole_requests_are_right_or_refused(situations):
    outcome = walk_situations(5, range(situations))
    assert not outcome.faults, "\n".join(outcome.faults)
    assert outcome.counts.total() == situations * REQUESTS_OF_ONE
    assert outcome.counts["right"] > outcome.counts.total() / 3


def test_a_wrong_number_is_a_fault(monkeypatch):
    monkeypatch.setattr(plain_attention, "may_look", lambda mask, p, j, surplus, keys: j <= p + 1)
    outcome = walk_situations(5, range(5, 9))
    assert outcome.counts["wrong"]
    assert "situation 5:" in outcome.faults[0]
