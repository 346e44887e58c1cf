"""Pairs of generated texts, told with the token that each query chose: against loops over transformers' own weights."""

import numpy as np
import pytest
import torch
from tests.models.generation.decoding.test_joined import LONG, Callers, alone, loaded, same
from tests.models.generation.decoding.test_joined_encoders import loaded as loaded_encoder
from tests.weight_loops import of_pairs
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_service.models.generation.generation_turns import read_prompts

WINDOW = 16
PROMPT = [3 + 7 * number % 83 for number in range(21)]
LAST, NEW = len(PROMPT) - 1, 6
KINDS = {
    "gpt2": {"n_positions": 256},
    "llama": LONG,
    "qwen3": LONG,
    "gemma2": {"sliding_window": WINDOW, **LONG},
    "mistral": {"sliding_window": WINDOW, **LONG},
    "gpt_oss": {"sliding_window": WINDOW, **LONG},
    "deepseek_v3": LONG,
    "bloom": {},
    "opt": LONG,
    "jamba": LONG,
}
PAIRS = [[LAST, 2], [LAST, LAST], [LAST + 1, LAST - 3], [LAST + 3, LAST + 3], [LAST + 3, 17], [LAST + 3, 17]]
CANDIDATES = [2, 17, LAST - 3, LAST + 3]


def asked(pairs, candidates=None, **look):
    options = {"pairs": pairs} | ({} if candidates is None else {"candidates": candidates})
    return {"statistics": ["pairs"], "statistic_options": options} | look


def told(choice):
    """The pairs of each token by layer, as arrays by name; the query is the token before."""
    return [
        (
            token.position - 1,
            {str(each.layer): {name: np.array(x, np.float64) for name, x in each.statistics.pairs.items()}
             for each in token.layers},
        )
        for token in choice.attention
    ]  # fmt: skip


def whole_weights(kind, ids):
    """The weights of the whole text as transformers computes them itself, by layer."""
    model = built(kind, **KINDS[kind]).requires_grad_(False)
    model.set_attn_implementation("eager")
    output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [None if each is None else each[0].double().numpy() for each in output.attentions]


@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "among"])
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_those_of_the_weights_of_the_whole_text(kind, candidates):
    (answer,) = alone(loaded(kind, **KINDS[kind]), prompt=PROMPT, max_tokens=NEW, attention=asked(PAIRS, candidates))
    ids = [*PROMPT, *(token.id for token in answer.attention)]
    matrices = [each for each in whole_weights(kind, ids) if each is not None]
    rows = told(answer)
    assert [query for query, _ in rows] == [*range(LAST, LAST + NEW)]
    for query, layers in rows:
        own = [pair for pair in PAIRS if pair[0] == query]
        assert len(layers) == len(matrices)
        for found, weights in zip(layers.values(), matrices, strict=True):
            assert found.keys() == {"share", "first"}
            if not own:
                assert np.isnan([*found.values()]).all()
                continue
            for head, matrix in enumerate(weights):
                seen = None if candidates is None else [key for key in candidates if key <= query]
                expected = of_pairs(matrix, own, seen)
                np.testing.assert_allclose(found["share"][head], expected["share"], atol=2e-6)
                assert found["first"][head] == pytest.approx(expected["first"])


def test_a_pair_between_tokens_that_look_at_themselves_alone_has_all_weight():
    """By construction: with scores of other keys hidden, each query gives its own key the weight 1."""
    pairs = [[LAST + at, LAST + at] for at in range(NEW)]
    hidden = {"tap": "scores", "set": -1e9, "keys": [*range(LAST + NEW)]}
    shown = [{"tap": "scores", "set": 0.0, "queries": [query], "keys": [query]} for query, _ in pairs]
    look = asked(pairs, layers=[1], edits={"1": [hidden, *shown]})
    (answer,) = alone(loaded("llama", **LONG), prompt=PROMPT, max_tokens=NEW, attention=look)
    for _, layers in told(answer):
        np.testing.assert_array_equal(layers["1"]["share"], 1)
        np.testing.assert_array_equal(layers["1"]["first"], 1)


def test_pairs_of_a_layer_that_looks_at_a_source_have_its_keys():
    model = loaded_encoder("t5")
    look = asked([[0, 20], [1, 4]], layers=["cross.0", "cross.1"], weights=True)
    (answer,) = alone(model, prompt=PROMPT, max_tokens=3, attention=look)
    for (query, layers), token in zip(told(answer), answer.attention, strict=True):
        key = {0: 20, 1: 4}.get(query)
        for each in token.layers:
            weights, found = np.array(each.weights), layers[str(each.layer)]
            if key is None:
                assert np.isnan(found["share"]).all()
            else:
                np.testing.assert_allclose(found["share"], weights[:, key], atol=1e-7)
                np.testing.assert_array_equal(found["first"], weights.argmax(1) == key)


@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_each_text_of_a_request_and_each_caller_has_pairs_of_its_own(kind):
    model = loaded_encoder(kind) if kind == "t5" else loaded(kind, **KINDS[kind])
    prompts = [PROMPT[: 5 + 3 * at] for at in range(5)]
    firsts = [0 if kind == "t5" else len(prompt) - 1 for prompt in prompts]
    pairs = [[[first, 0], [first + 1, first // 2]] for first in firsts]
    callers = Callers(model)
    for at, (prompt, own) in enumerate(zip(prompts, pairs, strict=True)):
        callers.begin(at, prompt=prompt, max_tokens=4, attention=asked(own, top_k=1))
    callers.begin("all", prompt=prompts, max_tokens=4, attention=asked(pairs, top_k=1))
    while unread := [each for each in callers.running.values() if each.unread]:
        assert not read_prompts(callers.decoder, unread, 10_000)
    together = callers.end()
    for at, (prompt, own) in enumerate(zip(prompts, pairs, strict=True)):
        expected = alone(model, prompt=prompt, max_tokens=4, attention=asked(own, top_k=1))
        same(together[at], expected)
        same([together["all"][at]], expected)


@pytest.mark.parametrize(
    ("look", "param", "says"),
    [
        (asked([[LAST - 1, 0]]), "pairs.0.0", f"{LAST} to {LAST + NEW - 1}"),
        (asked([[LAST, 0], [LAST + NEW, 0]]), "pairs.1.0", "chooses a token"),
        (asked([[LAST + 1, LAST + 2]]), "pairs.0.1", f"up to its query, {LAST + 1}"),
        (asked([[LAST, 0]], [LAST + NEW]), "candidates.0", "below"),
        (asked([[[LAST, 0]], [[LAST, 1]]]), "pairs", "got 2 lists"),
        (asked([[LAST, 0]]) | {"statistics": ["entropy"]}, "pairs", "name that in statistics"),
        ({"statistics": ["pairs"]}, "pairs", "has no pair"),
    ],
)
def test_pairs_that_no_token_can_have_are_refused_by_name(look, param, says):
    with pytest.raises(InvalidRequest) as refused:
        alone(loaded("llama", **LONG), prompt=PROMPT, max_tokens=NEW, attention=look)
    assert refused.value.param == f"attention.statistic_options.{param}"
    assert says in refused.value.detail


def test_keys_behind_a_source_are_refused_by_name():
    with pytest.raises(InvalidRequest, match="source, below 21") as refused:
        alone(loaded_encoder("t5"), prompt=PROMPT, max_tokens=40, attention=asked([[30, 21]], layers=["cross.0"]))
    assert refused.value.param == "attention.statistic_options.pairs.0.1"


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_pairs_of_a_model_without_attention_are_refused_as_its_attention_is(kind):
    with pytest.raises(InvalidRequest) as refused:
        alone(loaded(kind), prompt=PROMPT, max_tokens=NEW, attention=asked([[LAST, 0]]))
    assert refused.value.param == "attention"
