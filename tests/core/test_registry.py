"""The registries name every part that a spec can name, once, with its facts."""

from typing import get_args

import pytest
from tests.core.conftest import APPROXIMATIONS, MASKS, SPECS

from attention_contract import spec
from attention_service.core.registry import Registry, variants

UNIONS = {
    "score": spec.Score,
    "mask": spec.Mask,
    "position": spec.Position,
    "normalizer": spec.Normalizer,
    "method": spec.Method,
}


def members(union):
    """The option classes of a union, annotated or of one member."""
    inner = get_args(union)[0] if hasattr(union, "__metadata__") else union
    return get_args(inner) or (inner,)


@pytest.mark.parametrize("kind", UNIONS)
def test_every_part_of_the_contract_is_registered(kind):
    assert {entry.options for entry in variants() if entry.kind == kind} == set(members(UNIONS[kind]))


@pytest.mark.parametrize("entry", variants(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_entry_states_its_facts(entry):
    assert all((entry.summary, entry.formula, entry.gradient, entry.cost, entry.source))
    if entry.options is None:
        assert entry.schema["type"] == "object"
    else:
        assert entry.schema == entry.options.model_json_schema()
        assert entry.options.model_fields["name"].default == entry.name


@pytest.mark.parametrize("kind", UNIONS)
def test_the_tests_of_kernels_go_through_every_entry(kind):
    if kind == "mask":
        covered = {mask.name for masks in MASKS.values() for mask in masks}
    else:
        covered = {getattr(each, kind).name for each in [*SPECS.values(), *APPROXIMATIONS.values()]}
    assert covered == {entry.name for entry in variants() if entry.kind == kind}


def test_a_name_is_registered_once():
    registry = Registry("score")

    def facts():
        return registry.register(spec.Dot, formula="q·k", gradient="k", cost="O(1)", source="here")

    facts()(object)
    with pytest.raises(ValueError, match="dot"):
        facts()(object)
    assert [entry.name for entry in registry] == ["dot"]
