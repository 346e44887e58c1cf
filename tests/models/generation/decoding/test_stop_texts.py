"""Stop texts: the answer is the text before the first of them, however tokens divide it, streamed or not."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.transformers.families import tiny
from tests.models.small_models import device
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LogitsProcessor, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding.generated_text import GeneratedText
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.inputs.token_texts import TokenDecoder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of

LETTERS = bytes_to_unicode()
SPECIAL = "<special>"
"""A token that is left out of the text."""


def speaker(pieces):
    """Return a tokenizer of tokenizers that has these pieces of UTF-8 as its tokens, and the ids of the pieces.

    An empty piece is a special token.
    """
    names = [SPECIAL, *dict.fromkeys("".join(LETTERS[byte] for byte in piece) for piece in pieces if piece)]
    spoken = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token=SPECIAL))
    spoken.decoder = decoders.ByteLevel()
    spoken.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=spoken), [
        names.index("".join(LETTERS[byte] for byte in piece) or SPECIAL) for piece in pieces
    ]


@st.composite
def spoken_texts(draw):
    """A text, its UTF-8 in pieces, some of them empty, and stop texts, most of which it has."""
    text = draw(st.text("ab é😀\N{REPLACEMENT CHARACTER}", max_size=12))
    raw = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=len(raw) + 3)))
    pieces = [raw[begin:end] for begin, end in pairwise([0, *cuts, len(raw)])]
    parts = [text[begin:end] for begin in range(len(text)) for end in range(begin + 1, len(text) + 1)]
    stops = st.text("abé😀", min_size=1, max_size=3)
    return text, pieces, draw(st.lists(st.sampled_from(parts) | stops if parts else stops, max_size=4))


@settings(max_examples=400, deadline=None)
@given(spoken_texts())
def test_any_tokens_of_a_text_give_it_up_to_the_first_stop(spoken):
    text, pieces, stops = spoken
    expected = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    tokenizer, ids = speaker(pieces)
    generated, written = GeneratedText(TokenDecoder(tokenizer), [], stops), ""
    for token in ids:
        if not generated.stopped:
            written += generated.add(token)
            assert expected.startswith(written)  # nothing is taken back
    assert written + generated.rest() == expected
    assert generated.given == len(expected)
    assert generated.stopped == any(stop in text for stop in stops)


class Says(LogitsProcessor):
    """Have a model say these tokens."""

    def __init__(self, before, ids):
        self.before, self.ids = before, ids

    def __call__(self, input_ids, scores):
        scores = scores.clone().fill_(-1e9)
        scores[:, self.ids[input_ids.shape[1] - self.before]] = 0
        return scores


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("delta😀", " alpha beta gamma "),
        (["delta😀!?", "gamma delta!"], " alpha beta gamma delta😀!"),
        (["lta😀!", "ta😀"], " alpha beta gamma de"),
    ],
)
def test_a_model_that_says_a_stop_text_in_tokens_without_text_stops_before_it(monkeypatch, stream, stop, expected):
    pieces = [b" alpha beta gamma", b" delta", b"", *(bytes([byte]) for byte in "😀".encode()), b"!"]
    spoken, ids = speaker(pieces)
    model = LoadedModel("says", tiny("llama"), spoken, device())
    model.model.generation_config.eos_token_id = None  # it is one of these tokens
    fields = {"model": "says", "prompt": [1], "max_tokens": len(ids), "stop": stop, "stream": stream, "temperature": 0}
    request, given = validate(CompletionRequest, fields), []
    monkeypatch.setattr(Sampling, "processors", lambda _: [Says(1, ids)])
    done = generate(model, request, plan_generation(model, request), given.extend)
    objects = [orjson.loads(line) for line in lines_of([*given, *done.last]).split(b"\n") if line]
    choices = [each for reply in objects for each in reply["choices"]]
    assert "".join(each["text"] for each in choices) == expected
    assert choices[-1]["finish_reason"] == ("length" if expected.endswith("!") else "stop")
    model.close()
