"""Probes of statistics of heads that watch generations, beside the weights that transformers returns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.generation.test_watched_generations import prompts, run
from tests.models.small_models import eager, loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import StatisticFeature, WatchStop
from attention_contract.schemas.openai import AttentionOfTokens, CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.probes.token_features import query_statistics
from attention_service.models.generation.plans import watched_plan
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.streams.watched_probes import WatchedHeads

ID, BIAS = "1" * 32, 0.25
NAMES = ["entropy", "first_key", "mean_distance"]


def places(family):
    return [place for place in loaded(family).all_places if place.queries == "text"]


def probe(family, heads=None, stop=None):
    own = places(family)
    width = sum(len(NAMES) * (place.widths.heads if heads is None else len(heads)) for place in own)
    weights = np.random.default_rng(4).normal(size=width) / width
    of = StatisticFeature(statistics=NAMES, heads=heads)
    return WatchedHeads(ID, of, weights, BIAS, stop, own)


@torch.no_grad()
def by_hand(family, tokens, watched):
    """The scores of all tokens of a text, from the eager model's own weights."""
    ids = torch.tensor([tokens])
    rows = []
    for place, weights in zip(places(family), eager(family)(ids, output_attentions=True).attentions, strict=True):
        own = weights[0] if watched.of.heads is None else weights[0][watched.of.heads]
        rows.append(query_statistics(own.double(), ids[0], NAMES, place))
    return torch.cat(rows, -1).numpy() @ watched.weights + BIAS


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "mistral"])
def test_the_scores_are_those_of_transformers_weights_alone_and_among_sixteen(family):
    rows = prompts(16)
    watched, some = probe(family), probe(family, [2, 0])
    watches = [(watched, some, None)[number % 3] for number in range(16)]
    replies, plain = run(family, rows, watches), run(family, rows, [None] * 16)
    assert max(reply["ran"]["joined"] for reply in replies) > 1
    for row, watch, reply, other in zip(rows, watches, replies, plain, strict=True):
        (choice,), (unwatched,) = reply["choices"], other["choices"]
        assert choice["text"] == unwatched["text"]
        if watch is not None:
            expected = by_hand(family, [*row, *[token["id"] for token in choice["attention"]]], watch)
            found = [token["scores"][ID] for token in choice["attention"]]
            np.testing.assert_allclose(found, expected[len(row) - 1 : -1], atol=1e-5, rtol=0)
    (alone,) = run(family, rows[:1], [watched], alone=True)
    first = [[token["scores"][ID] for token in reply["choices"][0]["attention"]] for reply in (alone, replies[0])]
    np.testing.assert_allclose(*first, atol=1e-5, rtol=0)


def test_a_stop_and_a_report_go_with_it():
    (free,) = run("llama", prompts(1), [probe("llama")])
    scores = [token["scores"][ID] for token in free["choices"][0]["attention"]]
    above = sorted(scores)[-2]
    stopped = probe("llama", stop=WatchStop(above=above))
    (reply,) = run("llama", prompts(1), [stopped], attention={"statistics": ["entropy"], "layers": [1]})
    (choice,) = reply["choices"]
    assert len(choice["attention"]) == scores.index(max(scores)) + 1
    assert choice["stop_reason"]["score"] == pytest.approx(max(scores), abs=1e-6)
    assert [layer["layer"] for layer in choice["attention"][0]["layers"]] == [1]
    assert choice["attention"][0]["layers"][0]["statistics"].keys() == {"entropy"}


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("llama", {"weights": np.ones(3)}, "3 weights"),
        ("llama", {"of": StatisticFeature(statistics=["sink_mass"])}, "sink"),
        ("llama", {"of": StatisticFeature(statistics=["entropy"], heads=[9])}, "heads"),
        ("lfm2", {}, "weights"),
        ("t5", {}, "no generated token attends in it"),
    ],
)
def test_a_probe_that_the_model_cannot_watch_with_is_refused_by_field(family, change, reason, monkeypatch):
    watched = replace(WatchedHeads(ID, StatisticFeature(statistics=NAMES), np.ones(7), BIAS, None), **change)
    monkeypatch.setattr(watched_plan, "watched_heads", lambda *_: watched)
    wanted = validate(AttentionOfTokens, {"watch": [{"probe": ID}]})
    with pytest.raises(InvalidRequest, match=reason) as refused:
        watched_plan.watch_of(loaded(family), wanted, {ID: "unread"}, 8)
    assert refused.value.param.startswith("attention.watch.0.probe")


def test_a_watch_is_in_the_price_of_a_generation():
    """At least its scores, as they are told, and the weights of one layer for each text, in float64."""
    model, choices, tokens = loaded("llama"), 3, 40
    request = {"model": "m", "prompt": [3, 4], "max_tokens": tokens, "n": choices, "temperature": 1}
    plain = plan_generation(model, validate(CompletionRequest, request))
    watched = replace(plain, watch=[probe("llama")])
    more = watched.needed_bytes(model) - plain.needed_bytes(model)
    heads = max(place.widths.heads for place in places("llama"))
    least = choices * 8 * (tokens + heads * (2 + tokens) + len(watched.watch[0].weights))
    assert least < more < 20 * least
