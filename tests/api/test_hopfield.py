"""Hopfield retrieval over HTTP: layouts, heads, projections, masks, ends, and what is refused."""

import numpy as np
import pytest

from attention_client import Client, InvalidRequest, OverBudget
from attention_contract.schemas.analyses.hopfield import EXAMPLE_HOPFIELD
from attention_contract.tensors import DTYPES
from tests.api.talk import post, refuse
from tests.conftest import live_server

PATH = "/v1/hopfield/retrieve"
PAIR = {"stored": [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], "states": [[0.9, 0.1], [0.2, 0.7]]}


def test_the_example_completes_its_pattern(http):
    reply = post(http, PATH, **EXAMPLE_HOPFIELD)
    np.testing.assert_allclose(reply["states"], EXAMPLE_HOPFIELD["stored"][:1], atol=2e-3)
    assert reply["reached"]["pattern"] == [0]
    assert reply["reached"]["single"] == [True]
    assert reply["converged"] == [True]
    assert reply["change"][0] < EXAMPLE_HOPFIELD["eps"]
    assert len(reply["energy"][0]) == reply["steps"][0] + 1
    assert reply["energy"][0] == sorted(reply["energy"][0], reverse=True)
    assert reply["ran"]["kernel"] == "materialized"
    assert min(reply["ran"][name] for name in ("flops", "predicted_ms", "peak_bytes", "compute_ms")) > 0


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_states_come_back_in_their_dtype_and_energies_in_what_was_computed_in(client, rng, dtype, computed):
    stored = rng.normal(size=(9, 16)).astype(DTYPES[dtype])
    reply = client.hopfield.retrieve(stored, stored, beta=np.array(4.0), steps=3, return_association=True)
    assert reply.ran.dtype == computed
    assert {str(x.dtype) for x in (reply.states, reply.association)} == {dtype}
    assert {str(x.dtype) for x in (reply.energy, reply.change, reply.reached.weight)} == {computed}
    np.testing.assert_allclose(reply.states.astype(float), stored.astype(float), atol=2e-3)


def test_what_overflows_the_dtype_of_the_reply_is_refused(client):
    large = np.full((1, 2), 3e4, np.float16)
    assert client.hopfield.retrieve(large, large).states.tolist() == large.tolist()
    with pytest.raises(InvalidRequest, match="overflows float16"):
        client.hopfield.retrieve(large, large, projections={"output": np.ones((1, 2), np.float16) * 2})


def test_no_states_are_no_error(client):
    reply = client.hopfield.retrieve(np.ones((2, 3, 4)), np.ones((2, 0, 4)), steps=2)
    assert (reply.states.shape, reply.reached.pattern.shape) == ((2, 0, 4), (2, 0))
    reply = client.hopfield.retrieve(np.ones((0, 2, 3, 4)), np.ones((0, 2, 5, 4)), eps=0.1, return_association=True)
    assert (reply.states.shape, reply.association.shape) == ((0, 2, 5, 4), (0, 2, 5, 3))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"beta": 0}, "beta"),
        ({"beta": "NaN"}, "beta"),
        ({"beta": 1e300}, "beta"),
        ({"beta": [1.0, 2.0]}, "beta"),
        ({"beta": [-1.0]}, "beta.0"),
        ({"steps": 0}, "steps"),
        ({"eps": 0}, "eps"),
        ({"stored": []}, "stored"),
        ({"stored": {"dtype": "float32", "shape": [0, 2], "data": []}}, "stored"),
        ({"stored": [[1.0, 2.0, 3.0]]}, "stored"),
        ({"stored": [[[1.0, 2.0]]]}, "stored"),
        ({"stored": [["NaN", 0.0]]}, "stored"),
        ({"states": [["Infinity", 0.0]]}, "states"),
        ({"states": [1.0, 2.0]}, "states"),
        ({"states": {"dtype": "float32", "shape": [1, 0], "data": []}}, "states"),
        ({"states": {"dtype": "float64", "shape": [1, 2], "data": [1, 2]},
          "stored": {"dtype": "float32", "shape": [1, 2], "data": [1, 2]}}, "states"),
        ({"num_heads": 3}, "states"),
        ({"stored_mask": [True, False]}, "stored_mask"),
        ({"stored_mask": [False, False, False]}, "stored_mask"),
        ({"projections": {"state": [[1.0, 2.0, 3.0]]}}, "projections.state"),
        ({"projections": {"stored": [[1.0], [2.0]]}}, "projections.stored"),
        ({"projections": {"state": [["NaN", 2.0], [1.0, 1.0]]}}, "projections.state"),
        ({"projections": {"output": [[1.0, 2.0, 3.0]]}}, "projections.output"),
        ({"projections": {"key": [[1.0]]}}, "projections.key"),
        ({"stored": [[1.0, 1.0]], "projections": {"output": [[3e38, 3e38]]}}, "projections.output"),
        ({"stored": [[1e30, 1e30]], "states": [[1e30, 1e30]]}, "states"),
        ({"stored": [[1e300, 1.0]]}, "stored"),
        ({"beta": 1e38, "states": [[1e3, 1e3]]}, "states"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(http, change, param):
    problem = refuse(http, PATH, **PAIR | change)
    assert (problem["status"], problem.get("param")) == (422, param), problem
    assert len(problem["detail"]) > 20


@pytest.mark.slow
def test_what_is_too_much_is_refused_before_it_is_made(tmp_path):
    with live_server(tmp_path, memory_budget=2**26) as url, Client(url) as client:
        x = np.zeros((4000, 1), np.float32)
        with pytest.raises(OverBudget):
            client.hopfield.retrieve(x, x, steps=1, return_association=True)
        with pytest.raises(OverBudget):
            client.hopfield.retrieve(x[:2], x, eps=1e-3, max_steps=1000, num_heads=1, beta=1.0,
                                     projections={"state": np.ones((9, 1), np.float32),
                                                  "stored": np.ones((9, 1), np.float32),
                                                  "output": np.ones((5000, 9), np.float32)})  # fmt: skip
        assert client.hopfield.retrieve(x, x, steps=1).ran.peak_bytes < 2**26
