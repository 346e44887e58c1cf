import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from attention_contract.errors import (
    InvalidRequest,
    InvalidTensor,
    ModuleExists,
    ModuleNotFound,
    ShapeMismatch,
    VersionMismatch,
)
from attention_contract.schemas.modules import Biases, CreateModule, ImportModule, ModuleConfig
from attention_contract.tensors import DTYPES, FLOATS, decode
from attention_service.core.multihead import Sizes, initial_parameters, parameter_shapes
from attention_service.core.tensors import TORCH_DTYPES, to_numpy
from attention_service.modules import store as store_module
from attention_service.modules.library import Library
from attention_service.modules.parameters import describe
from attention_service.modules.resident import complete, content_version, making_bytes, parameter_bytes

ODD = {"num_kv_heads": 2, "num_heads": 4, "head_dim": 3, "value_dim": 5, "key_width": 6, "value_width": 7}


def arrays(module):
    return {name: to_numpy(value).copy() for name, value in module.parameters.items()}


def test_defaults_complete_a_config():
    config = complete(ModuleConfig(d_model=8, num_heads=2))
    assert config.model_dump(exclude={"spec"}) == {
        "d_model": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "value_dim": 4, "key_width": 8,
        "value_width": 8, "bias": True, "dtype": "float32",
    }  # fmt: skip
    assert complete(config) == config
    assert complete(ModuleConfig(d_model=8, num_heads=2, bias=Biases())).bias is False
    some = Biases(q_proj=True)
    assert complete(ModuleConfig(d_model=8, num_heads=2, bias=some)).bias == some


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_a_seeded_module_has_the_initial_parameters_in_its_dtype(library, request_for, dtype):
    request = request_for(seed=3, dtype=dtype, **ODD)
    module, new = library.create(request)
    assert new
    expected = initial_parameters(Sizes.of(request.config), 3, TORCH_DTYPES[dtype])
    assert list(module.parameters) == list(expected)
    for name, value in expected.items():
        assert torch.equal(module.parameters[name], value)
    info = module.info()
    assert info.bytes == library.resident_bytes == module.bytes
    largest = max(value.numel() for value in expected.values())
    more = library.estimate(request) - module.bytes  # temporary float32 numbers before rounding
    assert 4 * largest <= more <= (4 + module.parameters["q_proj.weight"].itemsize) * largest
    assert info.parameter_count == sum(value.numel() for value in expected.values())
    assert (info.device, info.source, len(info.version)) == ("cpu", None, 32)


@settings(max_examples=30, deadline=None)
@given(
    d_model=st.integers(1, 9), kv=st.integers(1, 3), groups=st.integers(1, 3), head_dim=st.integers(1, 5),
    value_dim=st.integers(1, 5), key_width=st.integers(1, 9), bias=st.booleans(), dtype=st.sampled_from(sorted(FLOATS)),
)  # fmt: skip
def test_the_estimate_equals_the_bytes_of_the_parameters(
    d_model, kv, groups, head_dim, value_dim, key_width, bias, dtype
):
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "key_width": key_width, "bias": bias, "dtype": dtype}
    config = complete(ModuleConfig(d_model=d_model, num_heads=kv * groups, num_kv_heads=kv, **sizes))
    made = initial_parameters(Sizes.of(config), 0, TORCH_DTYPES[dtype])
    assert parameter_bytes(config) == sum(value.nbytes for value in made.values())


def test_an_estimate_allocates_nothing(library):
    huge = CreateModule(name="huge", config={"d_model": 1_048_576, "num_heads": 65_536, "head_dim": 1_048_576})
    assert library.estimate(huge) > 2**50


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_given_parameters_decide_biases_and_dtype(library, request_for, dtype):
    shapes = parameter_shapes(Sizes.of(ModuleConfig(d_model=8, num_heads=2, bias=Biases(v_proj=True))))
    parameters = {name: np.full(shape, 0.5, DTYPES[dtype]) for name, shape in shapes.items()}
    module, _ = library.create(request_for(parameters=parameters))
    assert module.config.dtype == dtype
    assert module.config.bias == Biases(v_proj=True)
    assert all((value == 0.5).all() for value in module.parameters.values())
    assert library.estimate(request_for(parameters=parameters)) == making_bytes(module.config) > module.bytes


def test_given_parameters_are_copied_and_cast(library, request_for):
    source, _ = library.create(request_for("source", bias=False))
    given = arrays(source)
    given["q_proj.weight"] = np.asfortranarray(given["q_proj.weight"])
    module, _ = library.create(request_for("copy", parameters=given, bias=False))
    narrow, _ = library.create(request_for("narrow", parameters=given, dtype="bfloat16"))
    given["q_proj.weight"][:] = 9
    for name, value in source.parameters.items():
        assert torch.equal(module.parameters[name], value)
        assert torch.equal(narrow.parameters[name], value.bfloat16())


def test_lists_take_the_dtype_of_the_other_parameters_or_float32(library, request_for):
    typed = {name: value.astype(ml_dtypes.bfloat16) for name, value in
             arrays(library.create(request_for("source"))[0]).items()}  # fmt: skip
    untyped = {name: decode(value.astype(float).tolist()) for name, value in typed.items()}
    untyped["q_proj.bias"] = decode([1] * 8)
    assert library.create(request_for("a", parameters=untyped))[0].config.dtype == "float32"
    mixed = untyped | {"q_proj.weight": typed["q_proj.weight"]}
    assert library.create(request_for("b", parameters=mixed))[0].config.dtype == "bfloat16"


def test_wrong_parameters_are_refused_before_any_change(library, request_for):
    given = arrays(library.create(request_for("source"))[0])
    cases = [
        (InvalidRequest, "parameters", {n: v for n, v in given.items() if n != "o_proj.weight"}, {}),
        (InvalidRequest, "parameters", given | {"extra": np.zeros(2, np.float32)}, {}),
        (InvalidRequest, "parameters", given, {"bias": False}),
        (ShapeMismatch, "parameters.k_proj.weight", given | {"k_proj.weight": np.zeros((8, 9), np.float32)}, {}),
        (InvalidRequest, "config.dtype", given | {"k_proj.weight": np.zeros((8, 8), np.float16)}, {}),
    ]
    for error, param, parameters, config in cases:
        request = request_for(parameters=parameters, **config)
        for refuse in (library.estimate, library.create):
            with pytest.raises(error) as caught:
                refuse(request)
            assert caught.value.param == param
    with pytest.raises(InvalidRequest) as caught:
        library.create(request_for(parameters=given | {"o.weight": given["o_proj.weight"]}))
    assert caught.value.facts["unexpected"] == ["o.weight"]
    large = given | {"k_proj.weight": np.full((8, 8), 1e30, np.float32)}
    with pytest.raises(InvalidTensor) as caught:
        library.create(request_for(parameters=large, dtype="float16"))
    assert caught.value.param == "parameters.k_proj.weight"
    assert [module.name for module in library.list()] == ["source"]


def test_an_equal_creation_changes_nothing_and_a_different_one_conflicts(library, request_for):
    module, _ = library.create(request_for())
    assert library.create(request_for(seed=0)) == (module, False)
    assert library.create(request_for(parameters=arrays(module))) == (module, False)
    for other in (request_for(seed=1), request_for(bias=False)):
        with pytest.raises(ModuleExists) as caught:
            library.create(other)
        assert caught.value.facts["version"] == module.version
    assert library.get("m") is module


def test_the_error_for_a_missing_module_names_the_existing_ones(library, request_for):
    with pytest.raises(ModuleNotFound, match="there is none"):
        library.get("m")
    for i in range(12):
        library.create(request_for(f"m{i:02}"))
    assert [module.name for module in library.list()] == [f"m{i:02}" for i in range(12)]
    with pytest.raises(ModuleNotFound, match=r"m00, .*, m09 and 2 more"):
        library.get("m")


def test_a_pin_holds_until_the_parameters_change(library, request_for):
    module, _ = library.create(request_for())
    doubled = {name: value * 2 for name, value in arrays(module).items()}
    changed = library.replace("m", doubled, module.version)
    assert changed.version != module.version
    assert library.get("m", changed.version) is changed
    assert (
        library.replace("m", doubled, module.version) is changed
    )  # a client that lost the reply can repeat the request
    tripled = {name: value * 3 for name, value in doubled.items()}
    for attempt in (library.get, library.delete, lambda name, version: library.replace(name, tripled, version)):
        with pytest.raises(VersionMismatch) as caught:
            attempt("m", module.version)
        assert caught.value.facts == {"expected": module.version, "actual": changed.version}
    library.delete("m", changed.version)
    with pytest.raises(ModuleNotFound):
        library.delete("m")


def test_a_held_module_survives_a_replacement(library, request_for):
    module, _ = library.create(request_for())
    before = arrays(module)
    changed = library.replace("m", {name: value + 1 for name, value in before.items()})
    assert library.get("m") is changed
    for name, value in before.items():
        np.testing.assert_array_equal(to_numpy(module.parameters[name]), value)
        np.testing.assert_array_equal(to_numpy(changed.parameters[name]), value + 1)


def test_a_replacement_is_all_or_nothing(library, request_for, reopen):
    module, _ = library.create(request_for(dtype="float16"))
    given = {name: value.astype(np.float64) + 1 for name, value in arrays(module).items()}
    for error, parameters in [
        (InvalidRequest, {name: value for name, value in given.items() if name != "q_proj.bias"}),
        (InvalidRequest, given | {"sinks": np.zeros(2)}),
        (ShapeMismatch, given | {"o_proj.bias": np.zeros(7)}),
        (InvalidTensor, given | {"o_proj.bias": np.full(8, 1e30)}),
    ]:
        with pytest.raises(error):
            library.replace("m", parameters)
        assert library.get("m") is module
    assert reopen().get("m").version == module.version
    changed = library.replace("m", given)
    assert changed.config == module.config
    assert changed.parameters["q_proj.weight"].dtype == torch.float16
    assert library.replace("m", given) is changed  # no change


def test_a_version_is_a_function_of_config_and_content():
    config = {"a": 1}
    values = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3)}
    version = content_version(config, values)
    assert version == content_version(config, dict(reversed(values.items())))
    assert version == content_version(config, values | {"w": values["w"].T.contiguous().T})
    others = [
        content_version({"a": 2}, values),
        content_version(config, values | {"w": values["w"].reshape(3, 2)}),
        content_version(config, values | {"w": values["w"].double()}),
        content_version(config, values | {"w": values["w"] + 1}),
        content_version(config, {"w": values["w"], "c": values["b"]}),
    ]
    assert len({version, *others}) == 6
    assert version == "97a8d7aac3a5f3cc47365ef3eb52ead3"  # stored versions stay valid


def test_concurrent_creations_of_one_name_make_one_module(library, request_for):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: library.create(request_for()), range(8)))
    assert sum(new for _, new in made) == 1
    assert {id(module) for module, _ in made} == {id(library.get("m"))}


def test_a_missing_module_is_reported_while_another_is_written(library, request_for, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    written = store_module._write_parameters

    def slowly(path, module):
        writing.set()
        assert go_on.wait(60)
        written(path, module)

    monkeypatch.setattr(store_module, "_write_parameters", slowly)
    with ThreadPoolExecutor(2) as pool:
        creation = pool.submit(library.create, request_for("large"))
        assert writing.wait(60)
        try:
            with pytest.raises(ModuleNotFound):
                pool.submit(library.delete, "missing").result(30)
        finally:
            go_on.set()
        assert creation.result()[1]


def test_readers_always_see_a_complete_module(library, request_for, reopen):
    module, _ = library.create(request_for(bias=False))
    levels = [{name: np.full_like(value, level) for name, value in arrays(module).items()} for level in range(4)]
    library.replace("m", levels[0])
    stop = threading.Event()
    torn = []

    def look():
        while not stop.is_set():
            seen = {float(value.sum() / value.numel()) for value in library.get("m").parameters.values()}
            torn.extend([seen] if len(seen) > 1 else [])

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(look) for _ in range(2)]
        for future in [pool.submit(library.replace, "m", levels[i % 4]) for i in range(20)]:
            future.result()
        stop.set()
        for future in watching:
            future.result()
    assert not torn
    assert reopen().get("m").version == library.get("m").version


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_a_module_is_the_same_on_a_gpu(library, request_for, root, dtype):
    module, _ = library.create(request_for(dtype=dtype))
    on_gpu = Library(root, torch.device("cuda", 0))
    assert on_gpu.load() == []
    moved = on_gpu.get("m")
    assert moved.info() == module.info().model_copy(update={"device": "cuda:0"})
    assert content_version(moved.config.model_dump(mode="json"), moved.parameters) == module.version
    for name, value in module.parameters.items():
        assert torch.equal(moved.parameters[name].cpu(), value)
    described = describe(moved), describe(module)
    for a, b in zip(*(description.parameters for description in described), strict=True):
        assert (a.min, a.max) == (b.min, b.max)
        assert (a.mean, a.std, a.norm) == pytest.approx((b.mean, b.std, b.norm), rel=1e-12, abs=1e-15)
    changed = on_gpu.replace("m", {name: to_numpy(value) + 1 for name, value in moved.parameters.items()})
    assert changed.device.type == "cuda"
    assert library.refresh() == []
    assert library.get("m").version == changed.version


def in_memory(request_for, seed=0, **config):
    return request_for(seed=seed, **config).model_copy(update={"durable": False})


def test_a_module_that_is_not_durable_never_touches_the_disk(library, request_for, root, reopen):
    made, new = library.create(in_memory(request_for))
    assert new
    assert not made.info().durable
    assert library.create(in_memory(request_for)) == (made, False)
    replaced = library.replace("m", {name: value + 1 for name, value in arrays(made).items()})
    assert replaced.version != made.version
    assert not replaced.info().durable
    assert library.refresh() == []
    assert library.get("m") is replaced
    assert list(root.iterdir()) == []
    with pytest.raises(ModuleNotFound):
        reopen().get("m")
    library.delete("m", replaced.version)
    assert library.list() == []
    assert library.resident_bytes == 0


@pytest.mark.parametrize("durable_first", [True, False])
def test_one_name_is_durable_or_not(library, request_for, durable_first):
    requests = request_for(seed=0), in_memory(request_for)
    first, second = requests if durable_first else requests[::-1]
    made, _ = library.create(first)
    with pytest.raises(ModuleExists, match="durable"):
        library.create(second)
    assert library.get("m") is made


def test_the_version_says_nothing_of_durability(library, request_for):
    durable, _ = library.create(request_for(seed=0))
    memory, _ = library.create(in_memory(request_for).model_copy(update={"name": "other"}))
    assert durable.version == memory.version


def test_a_checkpoint_can_be_imported_into_memory_alone(library, root):
    weight = torch.eye(8)
    (root / "net").mkdir()
    tensors = {"in_proj_weight": torch.cat([weight] * 3), "out_proj.weight": weight}
    save_file(tensors, root / "net" / "model.safetensors")
    made, _ = library.import_checkpoint(
        ImportModule(checkpoint="net", num_heads=2, spec={"masks": [], "add_zero_attn": False}, durable=False)
    )
    assert not made.info().durable
    assert made.source is not None
    assert [entry.name for entry in root.iterdir()] == ["net"]
