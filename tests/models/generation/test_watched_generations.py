"""Probes that watch generations, against transformers' own states and loops by hand, alone and among 16 callers."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.small_models import eager, loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import WatchStop
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.watched_states import TextWatch, scoring
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.streams.watched_probes import WatchedProbe

FAMILIES = "gpt2", "llama", "qwen3", "gemma2", "gpt_oss", "mistral", "lfm2"
NEW = 6
LAYER, BIAS, ID = {"lfm2": 1}, 0.25, "0" * 32


def weights(family):
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return drawn / drawn.norm()


def probe(family, stop=None, prompt=False, point="hidden"):
    return WatchedProbe(ID, LAYER.get(family, 0), point, weights(family), BIAS, stop, prompt)


def prompts(count):
    """Prompts of unlike lengths."""
    return [[3 + (7 * number + at) % 9 for at in range(2 + number % 5)] for number in range(count)]


def run(family, rows, watches, by_caller=None, **fields):
    """Generate for many callers at once, and return the choice of each."""
    model, decoder, given = loaded(family), Decoder(loaded(family)), []
    running = []
    for row, watch, more in zip(rows, watches, by_caller or [{}] * len(rows), strict=True):
        sent = {"model": family, "prompt": row, "max_tokens": NEW, "temperature": 0, "ignore_eos": True} | fields | more
        request = validate(CompletionRequest, sent)
        plan = replace(plan_generation(model, request), watch=() if watch is None else [watch])
        running.append(RunningGeneration(decoder, request, plan, given.append))
    try:
        while waiting := [generation for generation in running if not generation.has_ended]:
            unread = [generation for generation in waiting if generation.unread]
            faults = read_prompts(decoder, unread, 10_000) if unread else decode(decoder, waiting)
            assert not faults
    finally:
        decoder.close()
    return [generation.end().last[0] for generation in running]


def states(family, tokens, point="hidden"):
    """The states after a layer, or what its MLP adds, as transformers has them ``[L, d]``."""
    model, found = eager(family), []
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    watched = layers[LAYER.get(family, 0)]

    def keep(_, __, output):
        found.append((output[0] if isinstance(output, tuple) else output)[0])

    hook = (watched if point == "hidden" else watched.mlp).register_forward_hook(keep)
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    hook.remove()
    return found[0].double()


def scores_of(choice):
    return [token["scores"][ID] for token in choice["attention"]]


def by_hand(family, row, choice):
    """The scores of all tokens of a text ``[L]``."""
    tokens = [*row, *[token["id"] for token in choice["attention"]]]
    return (states(family, tokens) @ weights(family) + BIAS).numpy()


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scores_are_those_of_transformers_states_alone_and_among_sixteen(family):
    rows = prompts(16)
    watches = [probe(family, prompt=number == 3) if number % 3 == 0 else None for number in range(16)]
    together, plain = run(family, rows, watches), run(family, rows, [None] * 16)
    assert max(reply["ran"]["joined"] for reply in together) > 1
    for number, (row, reply, other) in enumerate(zip(rows, together, plain, strict=True)):
        (choice,), (unwatched,) = reply["choices"], other["choices"]
        assert (choice["text"], choice["finish_reason"]) == (unwatched["text"], unwatched["finish_reason"])
        if watches[number] is None:
            assert choice.keys() == unwatched.keys()
            continue
        expected = by_hand(family, row, choice)
        np.testing.assert_allclose(scores_of(choice), expected[len(row) - 1 : -1], atol=1e-5, rtol=1e-6)
        if number == 3:
            np.testing.assert_allclose(choice["prompt_scores"][ID], expected[: len(row)], atol=1e-5, rtol=1e-6)
    ((alone,),) = [reply["choices"] for reply in run(family, rows[:1], [probe(family)], alone=True)]
    np.testing.assert_allclose(scores_of(alone), scores_of(together[0]["choices"][0]), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_probe_of_the_mlp_scores_what_it_adds(family):
    rows = prompts(4)
    for row, reply in zip(rows, run(family, rows, [probe(family, point="mlp")] * 4), strict=True):
        (choice,) = reply["choices"]
        tokens = [*row, *[token["id"] for token in choice["attention"]]]
        expected = (states(family, tokens, "mlp") @ weights(family) + BIAS).numpy()
        np.testing.assert_allclose(scores_of(choice), expected[len(row) - 1 : -1], atol=1e-5, rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_stop_ends_the_text_at_the_token_that_a_loop_finds_and_no_other_text(family, after):
    rows = prompts(6)
    free = run(family, rows, [probe(family)] * 6)
    above = sorted(max(scores_of(reply["choices"][0])[after:]) for reply in free)[2] - 1e-4
    stop = WatchStop(above=above, after=after)
    watches = [probe(family, stop) if number % 2 == 0 else None for number in range(6)]
    stopped = 0
    for number, (reply, other) in enumerate(zip(run(family, rows, watches), free, strict=True)):
        (choice,), (whole,) = reply["choices"], other["choices"]
        if watches[number] is None:
            assert (choice["text"], choice["finish_reason"]) == (whole["text"], "length")
            continue
        end = next((at for at, score in enumerate(scores_of(whole)) if at >= after and score > above), None)
        ids = [token["id"] for token in whole["attention"]]
        kept = ids if end is None else ids[: end + 1]
        assert [token["id"] for token in choice["attention"]] == kept
        assert choice["finish_reason"] == ("length" if end is None else "stop")
        if end is None:
            assert "stop_reason" not in choice
        else:
            stopped += 1
            reason = choice["stop_reason"]
            assert (reason["probe"], reason["token"]) == (ID, end)
            assert reason["score"] == pytest.approx(scores_of(whole)[end], abs=1e-5)
    assert stopped


def test_each_choice_of_a_prompt_has_the_scores_of_its_own_tokens():
    (reply,) = run("llama", prompts(1), [probe("llama")], n=3, temperature=1.5, seed=4)
    texts = set()
    for choice in reply["choices"]:
        expected = by_hand("llama", prompts(1)[0], choice)
        np.testing.assert_allclose(scores_of(choice), expected[1:-1], atol=1e-5, rtol=1e-6)
        texts.add(choice["text"])
    assert len(texts) > 1


class Sites:
    """Points that keep the changes of a pass."""

    @contextmanager
    def changing(self, changes):
        self.changes = changes
        yield


@pytest.mark.parametrize(("ends", "expected"), [(None, [[11.0, 16.0], [31.0]]), ([0, 1, 0, 1], [[5.0, 4.0], [31.0]])])
def test_rows_are_chosen_by_index_so_that_no_other_text_reaches_a_score(ends, expected):
    one, two = torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double()
    first = WatchedProbe("1" * 32, 0, "hidden", one, 1.0, None, prompt=False)
    second = WatchedProbe("2" * 32, 0, "hidden", two, 0.0, None, prompt=False)
    state = torch.tensor([[[torch.nan] * 2] * 2, [[9.0, 9], [9, 9]], [[4.0, 0], [10, 6]], [[20.0, 0], [30, 0]]])
    watches, sites = [None, None, TextWatch([first, second]), TextWatch([first])], Sites()
    with scoring(watches, sites, ends):
        for point, read in sites.changes:
            assert (point, read(state)) == ((0, "hidden"), None)
    assert [watch.last for watch in watches if watch] == expected


def test_probes_of_several_points_keep_their_numbers_and_biases():
    draws = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    probes = [
        WatchedProbe(str(number) * 32, number % 2, "hidden", draws[number], float(number), None, prompt=False)
        for number in range(4)
    ]
    texts = [probes, probes[:2], [probes[3], probes[0]], probes]
    watches, sites = [TextWatch(own) for own in texts], Sites()
    states = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(2))
    with scoring(watches, sites):
        for (layer, _), read in sites.changes:
            read(states[layer])
    for row, (watch, own) in enumerate(zip(watches, texts, strict=True)):
        expected = [float(states[probe.layer, row, -1].double() @ probe.weights) + probe.bias for probe in own]
        assert watch.last == pytest.approx(expected, abs=1e-12)


def test_a_probe_of_another_width_is_refused():
    other = WatchedProbe(ID, 0, "hidden", torch.zeros(3).double(), 0.0, None, prompt=False)
    sites = Sites()
    with scoring([TextWatch([other])], sites), pytest.raises(InvalidRequest, match="3 weights, and the states are 2"):
        sites.changes[0][1](torch.zeros(1, 1, 2))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_steered_watched_and_plain_texts_among_sixteen_are_each_as_alone(family):
    """Prompts of steered texts are read with those of others, each with its own vector."""
    rows, drawn = prompts(16), torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    watches = [probe(family) if number % 3 == 1 else None for number in range(16)]
    steered = [
        {"attention": {"statistics": [], "edits": {"0": [{"tap": "hidden", "add": drawn[number].tolist()}]}}}
        if number % 3 == 2 else {}
        for number in range(16)
    ]  # fmt: skip
    together = run(family, rows, watches, logprobs=0, by_caller=steered)
    assert max(reply["ran"]["joined"] for reply in together) == 16
    for number, reply in enumerate(together):
        own = slice(number, number + 1)
        (lonely,) = run(family, rows[own], watches[own], logprobs=0, alone=True, by_caller=steered[own])
        (choice,), (expected,) = reply["choices"], lonely["choices"]
        assert choice["text"] == expected["text"]
        one, other = (each["logprobs"]["token_logprobs"] for each in (choice, expected))
        np.testing.assert_allclose(one, other, atol=1e-5)
        if watches[number] is not None:
            np.testing.assert_allclose(scores_of(choice), scores_of(expected), atol=1e-5)
