"""The names of vLLM that the plugin uses are there. A version without one fails here by that name."""

import dataclasses
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from attention_vllm import vllm_names

NAMES = [(module, name) for module, names in vllm_names.IMPORTED.items() for name in names]
FIELDS = [(place, name) for place, names in vllm_names.FIELDS.items() for name in names]
METHODS = [(place, name) for place, names in vllm_names.METHODS.items() for name in names]
ATTRIBUTES = [(module, name) for module, names in vllm_names.ATTRIBUTES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_is_there(module, name):
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_a_field_is_there(place, name):
    module, _, kind = place.partition(":")
    assert name in {each.name for each in dataclasses.fields(getattr(import_module(module), kind))}


@pytest.mark.parametrize(("place", "name"), METHODS)
def test_a_method_is_there(place, name):
    module, _, kind = place.partition(":")
    assert callable(getattr(getattr(import_module(module), kind), name))


@pytest.mark.parametrize(("module", "name"), ATTRIBUTES)
def test_an_attribute_is_set(module, name):
    source = Path(find_spec(module).origin).read_text("utf-8")
    assert f"{name} = " in source or f"{name}: " in source


@pytest.mark.parametrize("module", ["cpu_attn", "flash_attn", "triton_attn"])
def test_layers_and_builders_take_the_arguments_that_ours_pass_on(module):
    backend = import_module(f"vllm.v1.attention.backends.{module}")
    (layer,) = (
        member
        for name, member in vars(backend).items()
        if name.endswith("AttentionBackendImpl") or name in {"FlashAttentionImpl", "TritonAttentionImpl"}
    )
    assert tuple(inspect.signature(layer.forward).parameters) == vllm_names.FORWARD
    (builder,) = (
        member
        for name, member in vars(backend).items()
        if name in {"CPUAttentionMetadataBuilder", "FlashAttentionMetadataBuilder", "TritonAttentionMetadataBuilder"}
    )
    assert tuple(inspect.signature(builder.build).parameters) == vllm_names.BUILD


def test_gpu_backends_are_ours_and_support_no_full_graphs():
    from vllm.v1.attention.backend import AttentionCGSupport

    from attention_vllm.inside.gpu_backends import ObservingFlashBackend, ObservingTritonBackend

    for backend in (ObservingFlashBackend, ObservingTritonBackend):
        assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
        assert "attention_vllm" in backend.get_impl_cls().__module__
