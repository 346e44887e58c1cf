import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract.errors import InvalidRequest, ParameterNotFound, VersionMismatch
from attention_contract.schemas.modules import ModuleConfig, ParameterQuery
from attention_service.core.multihead import initial_parameters
from attention_service.core.tensors import to_numpy
from attention_service.modules import parameters
from attention_service.modules.resident import Module, Sizes, complete


def made(dtype="float32", **config):
    full = complete(ModuleConfig.model_validate({"d_model": 8, "num_heads": 2, "dtype": dtype} | config))
    return Module.of("m", full, initial_parameters(Sizes.of(full), 0, getattr(torch, dtype)))


GROUPED = made(num_heads=4, num_kv_heads=2, head_dim=3, value_dim=5)


def test_statistics_equal_numpy_in_float64(monkeypatch):
    monkeypatch.setattr(parameters, "_CHUNK", 7)  # many chunks per parameter, the last one short
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        module = made(dtype)
        described = parameters.describe(module)
        assert (described.name, described.version) == ("m", module.version)
        assert [info.name for info in described.parameters] == list(module.parameters)
        for info in described.parameters:
            value = to_numpy(module.parameters[info.name].double())
            assert (info.shape, info.dtype) == (list(value.shape), dtype)
            assert info.bytes == module.parameters[info.name].nbytes
            np.testing.assert_allclose(
                [info.mean, info.std, info.min, info.max, info.norm],
                [value.mean(), value.std(), value.min(), value.max(), np.linalg.norm(value)],
                rtol=1e-12,
                atol=1e-15,
            )


def test_statistics_of_large_numbers_far_from_zero_keep_their_precision():
    values = {name: torch.full_like(value, 1e8) for name, value in made("float64").parameters.items()}
    values["q_proj.bias"] += torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    (info,) = (
        info
        for info in parameters.describe(Module.of("m", made("float64").config, values)).parameters
        if info.name == "q_proj.bias"
    )
    assert (info.mean, info.std) == (1e8, 1.0)


def test_statistics_cover_finite_numbers_and_count_the_others(monkeypatch):
    monkeypatch.setattr(parameters, "_CHUNK", 3)  # some chunks have no finite number
    values = {name: value.clone() for name, value in made().parameters.items()}
    bias = values["q_proj.bias"]
    bias[:] = torch.tensor([torch.nan, 3.0, -torch.inf, torch.nan, torch.inf, torch.nan, -4.0, 1.0])
    values["k_proj.bias"][:] = -torch.inf
    described = {info.name: info for info in parameters.describe(Module.of("m", made().config, values)).parameters}
    statistics = described["q_proj.bias"]
    assert (statistics.min, statistics.max, statistics.mean, statistics.non_finite) == (-4, 3, 0, 5)
    assert (statistics.std, statistics.norm) == (pytest.approx((26 / 3) ** 0.5), pytest.approx(26**0.5))
    nothing = described["k_proj.bias"]
    assert np.isnan([nothing.min, nothing.max, nothing.mean, nothing.std, nothing.norm]).all()
    assert nothing.non_finite == 8
    assert described["v_proj.bias"].non_finite == 0


@pytest.mark.parametrize(
    ("parameter", "heads", "expected"),
    [
        ("q_proj.weight", 4, lambda value, h: value[3 * h : 3 * h + 3]),
        ("q_proj.bias", 4, lambda value, h: value[3 * h : 3 * h + 3]),
        ("k_proj.weight", 2, lambda value, h: value[3 * h : 3 * h + 3]),
        ("k_proj.bias", 2, lambda value, h: value[3 * h : 3 * h + 3]),
        ("v_proj.weight", 2, lambda value, h: value[5 * h : 5 * h + 5]),
        ("v_proj.bias", 2, lambda value, h: value[5 * h : 5 * h + 5]),
        ("o_proj.weight", 4, lambda value, h: value[:, 5 * h : 5 * h + 5]),
    ],
)
def test_a_head_of_a_parameter(parameter, heads, expected):
    value = GROUPED.parameters[parameter]
    for head in range(heads):
        read = parameters.read(GROUPED, parameter, ParameterQuery(head=head))
        assert torch.equal(read, expected(value, head))
    with pytest.raises(InvalidRequest, match=f"expected 0 to {heads - 1}") as caught:
        parameters.read(GROUPED, parameter, ParameterQuery(head=heads))
    assert (caught.value.param, caught.value.facts) == ("head", {"heads": heads, "actual": heads})


def test_a_parameter_without_heads():
    with pytest.raises(InvalidRequest, match="does not consist of heads") as caught:
        parameters.read(GROUPED, "o_proj.bias", ParameterQuery(head=0))
    assert caught.value.param == "head"


def test_a_slice_of_a_head():
    read = parameters.read(GROUPED, "o_proj.weight", ParameterQuery(head=1, slice="::2,-1"))
    assert torch.equal(read, GROUPED.parameters["o_proj.weight"][:, 5:10][::2, -1])


BOUND = st.one_of(st.none(), st.integers(-20, 20), st.just(10**30))
ITEM = st.one_of(
    st.integers(-8, 7),
    st.builds(slice, BOUND, BOUND, st.one_of(st.none(), st.integers(1, 9), st.just(10**30))),
)


def _text(item):
    if isinstance(item, int):
        return str(item)
    parts = ["" if part is None else str(part) for part in (item.start, item.stop, item.step)]
    return ":".join(parts if parts[2] else parts[:2])


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=2))
def test_a_slice_equals_numpy(items):
    module = GROUPED
    value = module.parameters["o_proj.weight"][:8, :8].contiguous()
    small = Module("m", module.config, module.sizes, {"o_proj.weight": value}, "0" * 32)
    read = parameters.read(small, "o_proj.weight", ParameterQuery(slice=" , ".join(map(_text, items))))
    np.testing.assert_array_equal(to_numpy(read), to_numpy(value)[tuple(items)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "item 0 of the slice is ''"),
        ("0:4,", "item 1 of the slice is ''"),
        ("a", "item 0 of the slice is 'a'"),
        ("1:2:3:4", "expected an index or start:stop:step"),
        ("...", "expected an index"),
        ("1.5", "expected an index"),
        ("0,0,0", "3 items, but there are 2 dimensions"),
        ("8", "index 8, out of range for size 8"),
        ("-9", "index -9, out of range for size 8"),
        ("::-1", "step -1; expected 1 or more"),
        (":,::0", "step 0; expected 1 or more"),
    ],
)
def test_the_error_for_an_invalid_slice_gives_the_reason(text, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        parameters.read(GROUPED, "o_proj.weight", ParameterQuery(slice=text))
    assert caught.value.param == "slice"


def test_the_error_for_an_unknown_parameter_names_the_existing_ones():
    with pytest.raises(ParameterNotFound, match=r"q_proj\.weight, .*, o_proj\.bias") as caught:
        parameters.read(GROUPED, "q", ParameterQuery())
    assert caught.value.facts["names"] == list(GROUPED.parameters)


def test_a_pin_is_checked():
    assert parameters.read(GROUPED, "q_proj.bias", ParameterQuery(version=GROUPED.version)).shape == (12,)
    with pytest.raises(VersionMismatch):
        parameters.read(GROUPED, "q_proj.bias", ParameterQuery(version="0" * 32))
