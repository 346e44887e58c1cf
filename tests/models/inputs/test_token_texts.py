"""The bytes of all tokens of a text, joined, are the text, by tokenizers whose texts are known by definition."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.models.inputs.tokenizers_by_kind import END, kinds

from attention_service.models.generation.decoding.generated_text import Characters, GeneratedText
from attention_service.models.inputs.token_texts import TokenDecoder, TokenTexts


def told(decoder, prompt, ids):
    """Return the bytes of each token behind a prompt; what is told last belongs to the last."""
    texts, parts = TokenTexts(decoder, prompt), []
    for token in ids:
        expected = texts.peek(token)
        parts.append(texts.add(token))
        assert parts[-1] == expected
    rest = texts.rest()
    return [*parts[:-1], parts[-1] + rest] if parts else []


@pytest.mark.sampled(name=4)
@pytest.mark.parametrize("name", kinds())
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_bytes_are_the_text(name, data):
    kind = kinds()[name]
    ids = data.draw(st.lists(st.integers(0, len(kind.names) - 1), max_size=8))
    expected = kind.bytes_of(ids)
    assert b"".join(told(TokenDecoder(kind.tokenizer), [], ids)) == expected
    generated = GeneratedText(TokenDecoder(kind.tokenizer), [], [])
    assert "".join([*map(generated.add, ids), generated.rest()]) == expected.decode(errors="replace")


@pytest.mark.sampled(name=4)
@pytest.mark.parametrize("name", [each for each in kinds() if each != "Python"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_answer_goes_on_with_its_prompt(name, data):
    kind = kinds()[name]
    token = st.integers(0, len(kind.names) - 1)
    prompt, ids = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=6))
    before, whole = kind.bytes_of(prompt), kind.bytes_of([*prompt, *ids])
    assert before + b"".join(told(TokenDecoder(kind.tokenizer), prompt, ids)) == whole


@pytest.mark.sampled(name=4)
@pytest.mark.parametrize("name", kinds())
@settings(max_examples=100, deadline=None)
@given(data=st.data())
@example(data=None)
def test_the_places_of_tokens_are_those_of_their_bytes(name, data):
    kind = kinds()[name]
    token = st.integers(0, len(kind.names) - 1)
    ids = [5, 3, 6] if data is None else data.draw(st.lists(token, max_size=8))
    generated, places = GeneratedText(TokenDecoder(kind.tokenizer), [], []), []
    text = ""
    for each in ids:
        text += generated.add(each)
        places.append(generated.last)
    text += generated.rest()
    if places:
        places[-1] = generated.last
    done = b""
    for place in filter(lambda each: each.raw, places):
        assert place.begin == len(done.decode(errors="replace")) - (begins_within(done, place.raw) and 1)
        done += place.raw
        assert place.end == len(done.decode(errors="replace"))
        if is_text(place.raw) and not begins_within(done[: -len(place.raw)], place.raw):
            assert text[place.begin : place.end] == place.raw.decode()


@pytest.mark.parametrize(
    "last", [b"\xed", b"\xed\xa0", b"\xed\x9f", b"\xe2\x82", b"\xf4\x90", b"\xf0\x9f", b"\xff", b"a"]
)
@pytest.mark.parametrize("further", [b"", b"\xa0", b"\xbf\xbf", b"\x80", b"b"])
def test_bytes_in_any_parts_are_the_characters_of_the_whole(last, further):
    """Halves of surrogates too, which Python's incremental decoder waits for."""
    whole = last + further
    for parts in ([whole], [last, further], [whole[at : at + 1] for at in range(len(whole))]):
        characters, text, places = Characters(), "", []
        for raw in filter(None, parts):
            place, new = characters.add(raw)
            text += new
            places.append(place)
        assert text + characters.rest() == whole.decode(errors="replace")
        done = b""
        for place in places:
            assert place.begin == len(done.decode(errors="replace")) - (begins_within(done, place.raw) and 1)
            done += place.raw
            assert place.end == len(done.decode(errors="replace"))


def begins_within(before, raw):
    """Return True if bytes go on with a character that those before have begun."""
    return bool(raw) and len((before + raw[:1]).decode(errors="replace")) == len(before.decode(errors="replace"))


def is_text(raw):
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "T5"])
def test_a_space_belongs_to_the_token_whose_it_is(name):
    kind = kinds()[name]
    the, bare = kind.names.index("▁the"), kind.names.index("the")
    decoder = TokenDecoder(kind.tokenizer)
    texts = TokenTexts(decoder, [the])
    assert [texts.peek(each) for each in (the, bare)] == [b" the", b"the"]
    first = TokenTexts(decoder, [kind.names.index(END)])
    assert first.peek(the) == (b" the" if name == "Gemma" else b"the")


def test_a_character_that_the_prompt_begins_is_of_the_first_token_unless_the_prompt_is_told():
    kind = kinds()["Gemma"]
    ids = [kind.names.index(f"<0x{byte:02X}>") for byte in "🐈".encode()]
    decoder = TokenDecoder(kind.tokenizer)
    for echoed, raw in ((False, "🐈".encode()[:3]), (True, "🐈".encode()[2:3])):
        generated = GeneratedText(decoder, ids[:2], [], echoed=echoed)
        assert generated.peek(ids[2]) == raw
        assert generated.add(ids[2]) + generated.add(ids[3]) == "🐈"
    other = GeneratedText(decoder, ids[:2], [])
    assert other.add(kind.names.index("the")) == "the"


def test_the_text_of_tokens_alone_has_the_names_of_special_ones():
    kind = kinds()["WordPiece"]
    ids = [kind.names.index(each) for each in (END, "cat", "##s", "on", END)]
    assert TokenDecoder(kind.tokenizer).written(ids) == "</s>cats on</s>"
    assert TokenDecoder(None).written([1, 25]) == "1 25"
