"""Tasks as an agent meets them, each solved by calls of the tools over HTTP, with answers that are known otherwise.

``tiny`` ships with heads that its README names: head 0.0 looks at the token before, and head 1.0 is an induction head.
"""

import numpy as np
import pytest

from attention_client import Client
from tests.api.doors.agents.conftest import OTHER, REPEATED, TEXT, answer, connected, opened


@pytest.fixture
def native(agents):
    """The service's own client, by which answers are checked."""
    with Client(agents.url, api_key=agents.key, timeout=60) as client:
        yield client


async def test_which_head_copies_the_previous_token(agents):
    async with connected(agents.url, agents.key) as client:
        ranked = await answer(client, "rank_heads", input=await opened(client, REPEATED), statistic="previous_token")
    first, second = ranked["heads"][:2]
    assert (first["layer"], first["head"]) == (0, 0)
    assert first["value"] > 0.6 > 2 * second["value"]
    assert "key before the query" in ranked["meaning"]


async def test_which_head_is_the_induction_head_and_what_it_looks_at(agents, native):
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client, TEXT)
        found = (await answer(client, "rank_heads", input=handle, statistic="induction"))["heads"][0]
        assert (found["layer"], found["head"]) == (1, 0)
        looked = await answer(client, "look_at_head", input=handle, layer=1, head=0)
    row = looked["rows"][-1]  # the text ends with " T" "am", which "ir" followed before
    assert (row["token"], row["keys"][0]["token"]) == ("am", "ir")
    weights = native.models.weights("tiny", TEXT, layers=[1]).layers[0].weights[0, -1]
    assert row["keys"][0]["position"] == int(weights.argmax())
    assert row["keys"][0]["weight"] == pytest.approx(weights.max(), rel=1e-3)


async def test_knocking_out_the_induction_head_raises_the_loss_and_another_head_does_not(agents, native):
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client, REPEATED)
        changes = {}
        for head in (0, 1, 2, 3):
            effect = await answer(client, "effect_of_edit", input=handle, heads=[{"layer": 1, "head": head}])
            changes[head] = effect["loss_change"]
    assert changes[0] > 0.5
    assert changes[0] > 4 * max(abs(changes[head]) for head in (1, 2, 3))
    # The same by the service's own client and numpy.
    losses = []
    for edits in ({}, {"1": [{"tap": "context", "heads": [0], "set": 0}]}):
        ids = native.models.forward("tiny", REPEATED).labels_of().ids
        positions = list(range(len(ids) - 1))[-64:]
        logits = native.models.forward("tiny", REPEATED, return_=["logits"], positions=positions, edits=edits).logits
        rows = logits.astype(np.float64)
        picked = rows[np.arange(len(positions)), [ids[position + 1] for position in positions]]
        losses.append((np.log(np.exp(rows).sum(-1)) - picked).mean())
    assert changes[0] == pytest.approx(losses[1] - losses[0], rel=1e-3)


async def test_a_gradient_names_the_head_that_the_knock_out_confirms(agents):
    """Of a wrong name against the right one, since a sure prediction has a gradient near zero."""
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client, TEXT)
        found = await answer(
            client, "gradient_of_prediction", input=handle, of={"token": "ir", "against": "o"}, count=4
        )
        assert {(0, 0), (1, 0)} == {(each["layer"], each["head"]) for each in found["heads"][:2]}
        effect = await answer(client, "effect_of_edit", input=handle, heads=[{"layer": 1, "head": 0}])
    assert found["value"] == pytest.approx(9.085, abs=0.01)
    changed = {each["token"]: each for each in effect["predicted"]}
    assert changed["ir"]["before"] > 0.9 > 0.1 > changed["ir"]["after"]
    assert effect["divergence"] > 1


async def test_patching_the_head_from_another_text_brings_its_name(agents):
    async with connected(agents.url, agents.key) as client:
        handle, source = await opened(client, TEXT), await opened(client, OTHER)
        compared = await answer(client, "compare_inputs", input=handle, other=source)
        assert (compared["heads"][0]["layer"], compared["heads"][0]["head"]) == (1, 0)
        assert [each["token"] for each in compared["differing"]] == [" T", "am", "ir", "o", " T", "am"]
        names = compared["predicted"][0]["token"], compared["other_predicted"][0]["token"]
        assert names == ("ir", "ov")
        patched = await answer(
            client, "effect_of_edit", input=handle, source=source, action="patch", heads=[{"layer": 1, "head": 0}],
            positions=[13], source_positions=[13],
        )  # fmt: skip
    first = patched["predicted"][0]
    assert max(patched["predicted"], key=lambda each: each["after"])["token"] == "ov"
    assert first["token"] in names


async def test_a_patch_from_the_same_text_changes_nothing(agents):
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client, TEXT)
        heads = [{"layer": layer, "head": head} for layer in range(4) for head in range(4)]
        same = await answer(client, "effect_of_edit", input=handle, source=handle, action="patch", heads=heads)
    assert abs(same["divergence"]) < 1e-6
    assert abs(same["loss_change"]) < 1e-6


async def test_why_a_weight_is_what_it_is(agents, native):
    async with connected(agents.url, agents.key) as client:
        found = await answer(client, "explain_weight", input=await opened(client, TEXT), layer=1, head=0)
    assert found["keys"][0]["token"] == "ir"
    assert found["error"] < 1e-5
    for key in found["keys"]:
        assert key["score"] == pytest.approx(key["dot"] / found["head_width"] ** 0.5, rel=2e-3)
    scores = native.models.forward("tiny", TEXT, layers=[1], return_=["scores"]).layers[0].scores[0, -1]
    exact = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    for key in found["keys"]:
        assert key["weight"] == pytest.approx(exact[key["position"]], rel=1e-3)
    assert sum(key["weight"] for key in found["keys"]) + found["other_weight"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
async def test_what_a_text_costs_and_how_long_it_may_be(agents, native):
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client, TEXT)
        found = await answer(client, "estimate_cost", input=handle, new_tokens=8, detail="detailed")
        cost = native.models.complexity("tiny", 14, new_tokens=8)
        assert (found["length"], found["max_length"], found["flops"]) == (14, 512, cost.prefill.flops)
        assert found["further"]["parameters"] == cost.parameters
        spec = {"masks": [{"name": "causal"}]}
        heads = {"num_heads": 8, "head_dim": 64, "spec": spec}
        short = await answer(client, "estimate_cost", attention=heads, length=512)
        long = await answer(client, "estimate_cost", attention=heads, length=4096, detail="detailed")
    assert short["low_ms"] < short["predicted_ms"] < short["high_ms"] < long["high_ms"]
    assert long["further"]["time_order"] == "O(n²·d)"
    assert long["flops"] > 30 * short["flops"]


async def test_one_text_in_other_tools_stays_the_same_input(agents):
    """An agent that lost its notes opens the text again, and goes on with the same handle."""
    async with connected(agents.url, agents.key) as client:
        handles = {await opened(client, TEXT, detail=detail) for detail in ("concise", "detailed")}
    assert len(handles) == 1
