"""The attention of generated tokens beside transformers' eager attention in float64."""

import numpy as np
import pytest

from conftest import MAKERS, STATISTICS, statistics_of, texts

LOOK = {"statistics": STATISTICS, "top_k": 3, "weights": True}
NEW = 12
PAGES = {"grouped": 30, "window": 20, "normed": 30, "capped": 30}
"""Pages, so few that texts are preempted; a window gives pages back."""


def compare(reference, name, prompts, tokens, results, asks):
    """Hold every token, layer and head to the reference. Returns the largest difference of weights."""
    worst = 0.0
    for prompt, made, own, ask in zip(prompts, tokens, results, asks, strict=True):
        if ask is None:
            assert own == [], "a request that did not ask was told"
            continue
        attentions, logits = reference(name, prompt + made)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made
        assert [each["position"] for each in own] == [*range(len(prompt), len(prompt) + len(made))], own[:1]
        for each in own:
            position = each["position"]
            assert [fields["layer"] for fields in each["layers"]] == [*range(len(attentions))]
            for fields in each["layers"]:
                exact = attentions[fields["layer"]][:, position - 1, :position]
                worst = max(worst, np.abs(fields["weights"] - exact).max())
                for statistic, numbers in statistics_of(exact).items():
                    np.testing.assert_allclose(fields["statistics"][statistic], numbers, rtol=1e-4, atol=2e-4)
                best = np.sort(exact, -1)[:, ::-1][:, :3]
                named = np.take_along_axis(exact, fields["top_keys"]["keys"], -1)
                np.testing.assert_allclose(named[:, : best.shape[1]], best, atol=2e-4)
    assert worst < 1e-4
    return worst


@pytest.mark.parametrize("name", MAKERS)
def test_every_token_is_told_of_as_transformers_computes_it(engine, reference, name):
    shared = texts(7, 1, 200, 200)[0]
    prompts = [*texts(1, 8, 3, 300), *texts(2, 4, 5, 40, prefix=shared), *texts(3, 4, 1, 3)]
    asks = [LOOK if number % 4 else None for number in range(16)]
    own = engine(name, max_num_batched_tokens=64, enable_prefix_caching=True, block_size=32)
    together = own.run(prompts, asks, NEW)
    print(name, "together", compare(reference, name, prompts, *together, asks), own.facts)
    assert own.facts["cached"] > 0
    in_turn = own.run(prompts, asks, NEW, at_once=2)
    print(name, "in turn", compare(reference, name, prompts, *in_turn, asks), own.facts)
    assert own.facts["cached"] > 1000


@pytest.mark.parametrize("name", MAKERS)
def test_texts_that_are_preempted_are_told_of_once(engine, reference, name):
    prompts = [*texts(1, 8, 3, 300), *texts(2, 4, 100, 140)]
    asks = [LOOK if number % 4 else None for number in range(12)]
    own = engine(name, length=512, max_num_batched_tokens=256, block_size=32, num_gpu_blocks_override=PAGES[name])
    tokens, results = own.run(prompts, asks, 40)
    print(name, compare(reference, name, prompts, tokens, results, asks), own.facts)
    assert own.facts["preemptions"] > 0
