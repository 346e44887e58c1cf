"""The price of a session: pages, the longest past that fits, and times that follow what is held."""

import pytest
import torch
from tests.runtime.sessions.session_tree import create, running
from tests.runtime.sessions.test_live_sessions import ROPE, opened, step, tokens

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.complexity import ComplexityRequest, RawComplexityRequest, SessionCost
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.kv_cache.slab import PAGE_TOKENS
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity import report, session_price
from attention_service.runtime.operations.complexity.subjects import DeviceMemory, RequestedSubjects

DEVICE = Device(torch.device("cpu"), "a cpu", 2**40, Roofline(Rates(1e11, 1e10, 1e-5)))
TOKEN_BYTES = 2 * 2 * 16 * 4
"""Keys and values of two heads of width 16 in float32."""
SINKS = {"name": "window_sinks", "sinks": 4, "window": 60}
HEAVY = {"name": "heavy_hitters", "heavy": 40, "window": 24}
SNAP = {"name": "snap_kv", "keep": 40, "window": 24}


def price(session, free=2**26, spec=None, session_free=None) -> SessionCost:
    """The price of a session of a module of 4 heads, 2 of keys and values."""
    shape = {"d_model": 64, "num_heads": 4, "num_kv_heads": 2}
    config = complete(ModuleConfig.model_validate(shape | {"spec": spec or {"masks": [{"name": "causal"}]}}))
    module = Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float32))
    request = ComplexityRequest.model_validate({"shape": {"queries": 8}, "session": session})
    assert request.session is not None
    return session_price.price(
        RequestedSubjects(module, request, DeviceMemory(DEVICE, free, free, session_free)).subject, request.session
    )


def times(found: SessionCost) -> list[float]:
    return [each.predicted.median_ms for each in found.steps]


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_full_session_takes_whole_pages_for_every_sequence(sequences):
    page = PAGE_TOKENS * TOKEN_BYTES * sequences
    found = price({"sequences": sequences, "pasts": [0, 63, 64, 1000]}, free=10 * page + page - 1)
    assert (found.token_bytes, found.page_tokens) == (TOKEN_BYTES, PAGE_TOKENS)
    assert found.longest == 10 * PAGE_TOKENS
    assert [each.held for each in found.steps] == [0, 63, 64, 1000]
    assert [each.bytes for each in found.steps] == [page, page, 2 * page, 16 * page]


def test_the_share_of_sessions_bounds_the_pages():
    page = PAGE_TOKENS * TOKEN_BYTES
    found = price({}, session_free=3 * page)
    assert (found.free_bytes, found.longest) == (3 * page, 3 * PAGE_TOKENS)


@pytest.mark.parametrize("policy", [SINKS, HEAVY], ids=lambda policy: policy["name"])
def test_a_bounded_policy_has_no_longest_past_and_a_step_time_that_stays(policy):
    page = PAGE_TOKENS * TOKEN_BYTES
    found = price({"policy": policy, "pasts": [16, 100, 100_000]}, free=2 * page)
    assert found.longest is None
    assert [each.held for each in found.steps] == [16, 64, 64]
    assert found.steps[1].bytes == found.steps[2].bytes == 2 * page
    assert times(found)[1] == times(found)[2]
    assert price({"policy": policy}, free=page).longest == PAGE_TOKENS


def test_votes_and_the_whole_past_beside_a_policy_take_time_and_pages():
    free = 8 * PAGE_TOKENS * TOKEN_BYTES
    plain, voting, snap, full = (
        price({"policy": policy, "pasts": [0, 5000]}, free=free) for policy in (SINKS, HEAVY, SNAP, {"name": "full"})
    )
    exact = price({"policy": SINKS | {"report_error": True}, "pasts": [0, 5000]}, free=free)
    assert times(voting)[1] > times(plain)[1]
    assert times(snap)[0] > times(plain)[0]
    assert times(snap)[1] == times(plain)[1]
    assert times(exact)[1] == pytest.approx(times(plain)[1] + times(full)[1])
    assert exact.steps[1].bytes == plain.steps[1].bytes + full.steps[1].bytes
    assert snap.longest == full.longest == 8 * PAGE_TOKENS
    assert exact.longest == 6 * PAGE_TOKENS


def test_a_step_over_a_longer_past_takes_longer_in_place_and_by_a_forward_pass():
    for spec in ({"masks": [{"name": "causal"}]}, {"normalizer": {"name": "sparsemax"}}):
        found = times(price({"pasts": [0, 10_000, 100_000]}, spec=spec))
        assert found == sorted(found)
        assert found[-1] > found[0]


@pytest.mark.parametrize(
    ("session", "spec", "param"),
    [
        ({"policy": SINKS}, {"position": {"name": "alibi"}}, "session.policy"),
        ({"pasts": [0, 100]}, {"position": {"name": "learned", "length": 100}}, "session.pasts.1"),
        ({}, {"masks": [{"name": "causal"}], "method": {"name": "linear", "rule": "delta"}}, "session"),
    ],
)
def test_a_session_that_cannot_be_is_refused_and_named(session, spec, param):
    with pytest.raises(InvalidRequest) as raised:
        price(session, spec=spec)
    assert raised.value.param == param


def test_a_position_table_ends_the_longest_past():
    assert price({"pasts": [0]}, spec={"position": {"name": "learned", "length": 100}}).longest == 100


def test_raw_attention_has_no_sessions():
    shape = {"shape": {"queries": 8}, "num_heads": 4, "head_dim": 16, "session": {}}
    with pytest.raises(InvalidRequest, match="belongs to a module"):
        report(None, RawComplexityRequest.model_validate(shape), DeviceMemory(DEVICE, 2**26, 2**26))


@pytest.mark.slow
async def test_a_live_session_has_the_bytes_of_its_price_and_grows_to_the_longest(tmp_path):
    async with running(tmp_path, session_share=2**14 / 2**28 * 3) as engine:
        await create(engine, "m", ROPE)
        ask = ComplexityRequest.model_validate({"shape": {"queries": 1}, "session": {"pasts": [63, 64]}})
        before = (await engine.complexity("m", ask)).session
        assert before is not None
        assert before.longest is not None
        ident = await opened(engine)
        for past, priced in enumerate(before.steps, 63):
            await step(engine, ident, tokens(past + 1 - engine.sessions.info(ident).length))
            assert engine.sessions.info(ident).bytes == priced.bytes
        await step(engine, ident, tokens(before.longest - 65))
        after = (await engine.complexity("m", ask)).session
        assert after is not None
        assert after.free_bytes == before.free_bytes - engine.sessions.info(ident).bytes
