"""Effects of a sweep of edits, over HTTP: each against two forward passes, with and without that one edit."""

import itertools

import numpy as np
import pytest

from tests.api.talk import post, refuse

MODULE = {"d_model": 12, "num_heads": 4, "num_kv_heads": 2, "dtype": "float64"}
CAUSAL = {"masks": [{"name": "causal"}]}
SWEEPS = {
    "each head's context is zero": {"tap": "context", "over": ["heads"], "set": 0},
    "each key and value head is doubled": {"tap": "v", "over": ["heads"], "scale": 2},
    "each key of each head": {"tap": "k", "over": ["heads", "keys"], "heads": [1], "keys": [4, 0], "set": 0.5},
    "each weight": {"tap": "weights", "over": ["queries", "keys"], "heads": [3], "set": 0, "renormalize": True},
    "some queries of two heads": {"tap": "scores", "over": ["queries"], "heads": [0, 2], "queries": [1, 3], "set": 9},
    "each query of all heads": {"tap": "q", "over": ["queries", "heads"], "scale": -1},
}  # fmt: skip


def edits_of(sweep, sizes):
    """One edit for each combination of the swept indices."""
    chosen = [sweep.get(axis) or range(sizes[axis]) for axis in sweep["over"]]
    for indices in itertools.product(*chosen):
        kept = {name: value for name, value in sweep.items() if name != "over"}
        yield kept | {axis: [index] for axis, index in zip(sweep["over"], indices, strict=True)}


def sizes_of(tap, heads, kv_heads, length):
    return {"heads": kv_heads if tap in "kv" else heads, "queries": length, "keys": length}


def measures(changed, plain):
    """The measures of ``[B, …]`` by their definition."""
    axes = tuple(range(1, plain.ndim))
    norm = np.sqrt(((changed - plain) ** 2).sum(axes))
    return {"norm": norm, "relative": norm / np.sqrt((plain**2).sum(axes)), "max": np.abs(changed - plain).max(axes)}


@pytest.fixture
def module(http):
    """A module whose creation is idempotent."""
    post(http, "/v1/modules", name="effects.causal", config=MODULE | {"spec": CAUSAL}, seed=3)
    return "/v1/modules/effects.causal"


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_each_effect_is_that_of_a_forward_pass_with_the_edit(http, module, rng, sweep):
    inputs = {"query": rng.normal(size=(2, 5, 12)).tolist(), "key_lengths": [5, 4]}
    before = [{"tap": "weights", "heads": [0], "keys": [0], "set": 0.25}]
    direction = rng.normal(size=(5, 12))
    body = inputs | {"sweep": sweep, "edits": before, "direction": direction.tolist(), "return_differences": True}
    reply = post(http, f"{module}/effects", **body)
    plain = np.array(post(http, f"{module}/forward", **inputs, edits=before)["output"])
    edits = list(edits_of(sweep, sizes_of(sweep["tap"], 4, 2, 5)))
    swept = [len(indices) for indices in reply["swept"].values()]
    assert list(reply["swept"]) == sweep["over"]
    assert np.prod(swept) == len(edits)
    found = {name: np.array(x).reshape(2, -1) for name, x in reply["effects"].items()}
    differences = np.array(reply["differences"]).reshape(2, len(edits), 5, 12)
    for index, edit in enumerate(edits):
        changed = np.array(post(http, f"{module}/forward", **inputs, edits=[*before, edit])["output"])
        np.testing.assert_allclose(differences[:, index], changed - plain, atol=1e-12)
        for name, expected in measures(changed, plain).items():
            np.testing.assert_allclose(found[name][:, index], expected, atol=1e-12, err_msg=name)
        along = ((changed - plain) * direction).sum((1, 2))
        np.testing.assert_allclose(found["projection"][:, index], along, atol=1e-12)
    assert found["norm"].any()


def test_each_head_is_patched_with_its_own_part_of_another_run(http, module, rng):
    clean, other = (rng.normal(size=(5, 12)).tolist() for _ in range(2))
    context = post(http, f"{module}/forward", query=other, **{"return": ["context"]})["context"]
    patch = {"tap": "context", "heads": [2, 0], "value": np.array(context)[[2, 0]].tolist()}
    reply = post(http, f"{module}/effects", query=clean, sweep=patch, queries=[4, 1], return_differences=True)
    plain = np.array(post(http, f"{module}/forward", query=clean)["output"])[[4, 1]]
    assert reply["swept"] == {"heads": [2, 0]}
    for index, head in enumerate((2, 0)):
        edit = {"tap": "context", "heads": [head], "value": np.array(context)[[head]].tolist()}
        changed = np.array(post(http, f"{module}/forward", query=clean, edits=[edit])["output"])[[4, 1]]
        np.testing.assert_allclose(np.array(reply["differences"])[index], changed - plain, atol=1e-12)
        assert reply["effects"]["norm"][index] == pytest.approx(np.linalg.norm(changed - plain))


@pytest.mark.parametrize("spec", [{}, {"method": {"name": "nystrom", "landmarks": 2}}], ids=["exact", "nystrom"])
@pytest.mark.parametrize("layout", ["one head", "heads apart", "heads side by side"])
def test_raw_attention_in_every_layout(http, rng, spec, layout):
    shape, more = {
        "one head": ((4, 6), {}),
        "heads apart": ((2, 3, 4, 6), {}),
        "heads side by side": ((2, 4, 6), {"num_heads": 3}),
    }[layout]
    inputs = {"query": rng.normal(size=shape).tolist(), "spec": spec, **more}
    sweep = {"tap": "q", "over": ["queries"], "scale": 3}
    reply = post(http, "/v1/attention/effects", **inputs, sweep=sweep, return_differences=True)
    plain = np.array(post(http, "/v1/attention/forward", **inputs)["output"])
    differences = np.array(reply["differences"])
    batched = layout != "one head"
    for query in range(4):
        changed = post(http, "/v1/attention/forward", **inputs, edits=[{"tap": "q", "queries": [query], "scale": 3}])
        expected = np.array(changed["output"]) - plain
        assert expected.any()
        np.testing.assert_allclose(differences[:, query] if batched else differences[query], expected, atol=2e-6)


def test_a_session_takes_effects_over_its_past(client, http, module, rng):
    x = rng.normal(size=(1, 6, 12))
    sweep = {"tap": "k", "over": ["keys", "heads"], "scale": 2.0}
    whole = client.effects("effects.causal", x, sweep=sweep, queries=[4, 5])
    with client.sessions.open("effects.causal") as session:
        session.step(x[:, :4])
        found = session.effects(x[:, 4:], sweep=sweep)
        assert session.length == 4
    assert found.swept == {"keys": [*range(6)], "heads": [0, 1]}
    np.testing.assert_allclose(found.effects.norm, whole.effects.norm, atol=1e-12)
    assert found.effects.norm.any()


def test_bad_sweeps_name_their_field(http, module, rng):
    query = rng.normal(size=(3, 12)).tolist()
    zero = {"tap": "context", "set": 0}
    for param, fields in {
        "sweep.over.1": {"sweep": zero | {"over": ["heads", "keys"]}},
        "sweep.heads": {"sweep": zero | {"heads": [4]}},
        "sweep.tap": {"sweep": {"tap": "output", "over": ["queries"], "set": 0}},
        "sweep.over": {"sweep": zero | {"over": ["heads", "heads"]}},
        "sweep.value": {"sweep": {"tap": "context", "value": [1.0, 2.0]}},
        "edits.0.tap": {"sweep": zero, "edits": [{"tap": "output", "set": 0}]},
        "queries": {"sweep": zero, "queries": [0, 0]},
        "direction": {"sweep": zero, "direction": [[1.0] * 12] * 2},
    }.items():
        assert refuse(http, f"{module}/effects", query=query, **fields)["param"] == param
    long = rng.normal(size=(300, 2)).tolist()
    many = {"tap": "weights", "over": ["queries", "keys"], "set": 0}
    found = refuse(http, "/v1/attention/effects", query=long, sweep=many)
    assert (found["param"], found["limit"], found["actual"]) == ("sweep", 65_536, 90_000)
