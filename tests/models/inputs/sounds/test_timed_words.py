"""The words of a text and their times are the same however tokens divide it."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_service.models.inputs.sounds.timed_words import TimedWord, timed_words


@st.composite
def divided(draw):
    """A text, and its UTF-8 in pieces, some of them empty."""
    text = draw(st.text("ab é中😀!\u3000", max_size=12))
    raw = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=len(raw) + 3)))
    return text, [raw[begin:end] for begin, end in pairwise([0, *cuts, len(raw)])]


def by_bytes(parts):
    """Return times by which each byte takes a second."""
    return [float(sum(map(len, parts[:at]))) for at in range(len(parts) + 1)]


def expected(text):
    """Return the words of a text whose every byte takes a second."""
    found, done = [], 0
    for word in text.split():
        begin = text.index(word, done)
        end = begin + len(word)
        found.append(TimedWord(word, float(len(text[:done].encode())), float(len(text[:end].encode()))))
        done = end
    return found


@settings(max_examples=400, deadline=None)
@given(divided())
@example((" café 中!", [b" ", b"caf", "é".encode(), b" ", "中".encode(), b"!"]))
@example((" café 中!", [b" caf" + b"\xc3", b"\xa9 ", b"\xe4", b"\xb8", b"\xad!"]))
def test_words_are_those_of_the_whole_text(case):
    text, parts = case
    found = timed_words(parts, by_bytes(parts))
    assert [each.word for each in found] == text.split()
    for one, other in zip(found, expected(text), strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(divided())
def test_each_piece_of_a_language_without_spaces_is_a_word(case):
    text, parts = case
    found = timed_words(parts, by_bytes(parts), spaced=False)
    assert "".join(each.word for each in found) == "".join(text.split())
    edges = [edge for each in found for edge in each[1:]]
    assert edges == sorted(edges)
    assert len(found) >= len(text.split())


def test_a_word_begins_with_its_token_and_ends_with_its_last():
    times = [0.0, 0.5, 1.0, 1.25, 2.0]
    words = timed_words([b" the", b" ca", b"t", b"."], times)
    assert words == [("the", 0.0, 0.5), ("cat.", 0.5, 2.0)]
    assert timed_words([b"a b"], [1.0, 4.0]) == [("a", 1.0, 2.0), ("b", 2.0, 4.0)]
    assert timed_words([b"", b"a", b""], [0.0, 1.0, 2.0, 3.0]) == [("a", 1.0, 2.0)]


def test_bytes_of_no_character_are_part_of_a_word():
    words = timed_words([b" \xff", b"a", b" \xe4\xb8"], [0.0, 1.0, 2.0, 3.0])
    assert words == [("\N{REPLACEMENT CHARACTER}a", 0.0, 2.0), ("\N{REPLACEMENT CHARACTER}", 2.0, 3.0)]
