"""The second turn of a conversation, by every type that generates: from what is kept, with the numbers of reading all.

The types are those of docs/models-table.md.
"""

import re

import numpy as np
import orjson
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built
from tools.models_walk.small_configs import small_config
from tools.models_walk.table_page import PAGE

from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding import read_texts
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of

FIRST, NEW, MORE = 30, 5, 3
NO_PAST = "it keeps no past|logits behind a prompt in parts differ"
NOT_KEPT = {
    "bert-generation": "logits behind a prompt in parts differ",
    "flaubert": NO_PAST, "mpt": NO_PAST, "openai-gpt": NO_PAST, "xlm": NO_PAST, "xlnet": NO_PAST,
}  # fmt: skip
"""Types without a past, and one whose tokens look at those behind them, with the words of the reason."""
NOT_TOLD = {"flaubert", "xlm", "xlnet"}
"""Types that run over other tokens than those of the text, so that generations tell of no weights."""
IN_FLOAT32 = {"minimax": "decays kept in float32", "xlnet": "a mask in float32"}
"""Types that compute with float32 numbers in float64, so that parts differ by their rounding."""
ENTRIES = {"moshi": {"sliding_window": 64}}
"""Its mask has no window, and its past has one."""


def generating():
    """The types that generate, by the page's column of texts that share passes."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text("utf-8").splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 14]
    (at,) = [at for at, name in enumerate(rows[0]) if name == "joined"]
    return [row[0] for row in rows[2:] if row[at] != "–"]


def loaded(kind):
    torch.set_num_threads(1)
    text = built(kind).config.get_text_config()
    entries = ENTRIES.get(kind, {})
    if getattr(text, "index_n_heads", None):
        # Among keys of one score, an indexer takes others in a pass over more of them. By many heads, no two have one.
        text.index_n_heads = 32
        entries = {"index_n_heads": 32} | ({"text_config": text} if hasattr(small_config(kind), "text_config") else {})
    model = built(kind, **entries).requires_grad_(False)
    model.to(torch.float32 if kind in IN_FLOAT32 else torch.float64)
    settings = model.generation_config
    settings.pad_token_id, settings.eos_token_id, settings.decoder_start_token_id = 0, None, 1
    return LoadedModel(kind, model, tokenizer(), device())


def turn(decoder, prompt, attention):
    """Generate, and return the answer and all tokens."""
    model = decoder.loaded
    fields = {"model": model.name, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "logprobs": 0}
    request = validate(CompletionRequest, fields | ({} if attention is None else {"attention": attention}))
    running = RunningGeneration(decoder, request, plan_generation(model, request), lambda _: None, "me")
    while not running.has_ended:
        for fault in (read_prompts(decoder, [running], 1_000) or decode(decoder, [running])).values():
            raise fault
    return validate(Completion, orjson.loads(lines_of(running.end().last))), running.first


def numbers(choice):
    """The log-probabilities of an answer, and the statistics of its tokens."""
    found = [*choice.logprobs.token_logprobs]
    for token in choice.attention or ():
        for layer in token.layers:
            for statistic in layer.statistics.model_dump(exclude_none=True).values():
                found += np.asarray(statistic, float).ravel().tolist()
    return np.asarray(found)


@pytest.mark.sampled(kind=6)
@pytest.mark.parametrize("kind", generating())
def test_the_second_turn_of_a_type_reads_what_is_new(kind, monkeypatch):
    monkeypatch.setattr(read_texts, "LEAST", 8)
    model = loaded(kind)
    attention = {"statistics": ["entropy", "max_weight", "mean_distance", "first_key"]}
    attention = attention if model.reported and kind not in NOT_TOLD else None
    kept, whole = Decoder(model, 2**24), Decoder(model)
    try:
        _, ids = turn(kept, [3 + 7 * number % 83 for number in range(FIRST)], attention)
        second = [*ids, 5, 9, 11][: FIRST + NEW + MORE]
        again, _ = turn(kept, second, attention)
        expected, _ = turn(whole, second, attention)
        cached = again.usage.prompt_tokens_details.cached_tokens
        if kind in NOT_KEPT or model.reader.pairs:
            assert cached == 0
            assert model.reader.pairs or re.search(NOT_KEPT[kind], kept.reading.reason)
        else:
            assert kept.reading.reason is None
            assert cached == FIRST + (NEW - 1 if kept.reading.by_steps else 0)
    finally:
        kept.close()
        whole.close()
    (one,), (other,) = again.choices, expected.choices
    assert [token.id for token in one.attention or ()] == [token.id for token in other.attention or ()]
    bound = 1e-5 if kind in IN_FLOAT32 else 1e-10
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=bound, atol=bound)
