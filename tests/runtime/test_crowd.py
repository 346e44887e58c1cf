"""Who counts as a crowd: simulated clients against the time at which one sees it."""

import pytest

from attention_service.runtime.scheduling.saturation import Crowd


def passes(crowd, waiting, arrivals, taken=1):
    """Passes that each take some of those that wait, while so many come; whether each began before a crowd."""
    found = []
    for came in arrivals:
        found.append(crowd.waits(waiting))
        now = min(taken, waiting)
        crowd.answers(now)
        waiting += came - now
        crowd.came += came
    return found


@pytest.mark.parametrize("clients", [4, 16, 64])
def test_clients_that_ask_again_when_they_are_answered_are_a_crowd(clients):
    crowd = Crowd()
    crowd.came += clients
    found = passes(crowd, clients, [1] * 40)
    assert not any(found[:3])
    assert all(found[10:])
    assert all(passes(crowd, clients, [clients] * 40, taken=clients))  # also when they are answered together


@pytest.mark.parametrize("before", [0, 100])
def test_a_burst_is_none(before):
    crowd = Crowd()
    passes(crowd, 1, [1] * before)  # after a client that was alone, too
    crowd.came += 32
    assert not any(passes(crowd, 32, [0] * 32))


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_few_are_none(clients):
    assert not any(passes(Crowd(), clients, [1] * 100))


def test_a_crowd_that_went_away_is_forgotten():
    crowd = Crowd()
    passes(crowd, 16, [1] * 40)
    passes(crowd, 1, [1] * 20)
    crowd.came += 15
    assert not any(passes(crowd, 16, [0] * 16))
