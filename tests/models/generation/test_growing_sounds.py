"""A sound that grows: the text stops where its heads look at the end, and goes on with the next piece."""

import pytest
from tests.models.generation.test_long_sounds import hearing, objects, written
from tests.models.inputs.sounds.small_listeners import STEP, spoken
from tests.models.inputs.sounds.small_sounds import END, RATE

from attention_contract.errors import InvalidRequest

__all__ = ["hearing"]
SAID = "abc def gab cde fga bcd"
"""5.75 seconds."""
LETTER = round(STEP / 0.02)
"""Frames of a letter, a half less."""


@pytest.mark.parametrize("frames", [7, 20, 45])
def test_a_letter_is_accepted_once_its_frame_is_not_among_the_last(hearing, frames):
    """The head of letter p looks at the middle of its quarter of a second."""
    sound, accepted = spoken(SAID), []
    for seconds in (1.0, 1.6, 2.5, 4.9, 5.75):
        reply = written(hearing, sound[: round(seconds * RATE)], growing={"accepted": accepted, "frames": frames})
        begin = seconds - frames * 0.02
        expected = sum((at + 0.5) * STEP < begin for at in range(len(SAID)))
        assert reply.accepted[: len(accepted)] == accepted
        assert abs(len(reply.accepted) - expected) <= 1
        assert SAID.startswith(reply.text)
        accepted = reply.accepted
    assert 0 < len(accepted) < len(SAID)
    last = written(hearing, sound, growing={"accepted": accepted, "frames": 0})
    offline = written(hearing, sound, growing={"frames": 0})
    assert last.text == offline.text == SAID
    assert last.accepted == offline.accepted


def test_events_are_of_what_is_new(hearing):
    sound = spoken(SAID)
    first = written(hearing, sound[: 3 * RATE], growing={"frames": 25})
    *events, done = objects(
        hearing, sound, stream=True, growing={"accepted": first.accepted, "frames": 0},
        attention={"top_k": 1, "statistics": []},
    )  # fmt: skip
    assert done["text"] == SAID
    assert SAID.endswith("".join(event["delta"] for event in events))
    begins = [token["seconds"][0] for event in events for token in event["attention"]]
    assert begins[0] == pytest.approx((len(first.accepted) + 0.5) * STEP, abs=0.03)
    assert len(done["accepted"]) == len(SAID)


@pytest.mark.parametrize(
    ("growing", "param"),
    [
        ({"accepted": [END]}, "growing.accepted.0"),
        ({"accepted": [3, 10**6]}, "growing.accepted.1"),
        ({"accepted": [-1]}, "growing.accepted.0"),
        ({"accepted": [3] * 25}, "growing.accepted"),
        ({"frames": -1}, "growing.frames"),
    ],
)
def test_what_was_never_accepted_is_refused_by_name(hearing, growing, param):
    with pytest.raises(InvalidRequest) as fault:
        written(hearing, spoken("abc"), growing=growing)
    assert fault.value.param == param


def test_a_sound_that_grew_beyond_what_the_model_hears_is_refused(hearing):
    with pytest.raises(InvalidRequest, match="begin a new one") as fault:
        written(hearing, spoken(SAID + SAID), growing={})
    assert fault.value.param == "file"
