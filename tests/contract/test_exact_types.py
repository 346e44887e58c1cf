"""Flags are no numbers and numbers are no flags, in any field of anything that comes over the wire."""

import numpy as np
import pytest

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.costs.complexity import RawComplexityRequest
from attention_contract.schemas.modules import CreateModule, ParameterQuery
from attention_contract.validation import members_of, validate


def models(kind=WireModel):
    for model in kind.__subclasses__():
        yield from models(model)
        if model.__module__.startswith("attention_contract") and not model.reads_text:
            yield model


def wrong(kinds):
    """A value of another JSON type, and the errors that tell so; None for a field that takes several."""
    if bool in kinds and not {int, float} & kinds:
        return 1, {"bool_type"}
    return (True, {"int_type", "float_type"}) if {int, float} & kinds and bool not in kinds else None


FIELDS = [
    (model, name, *case)
    for model in {*models()}
    for name, field in model.model_fields.items()
    if (case := wrong({*members_of(field.annotation)} & {int, float, bool})) is not None
]


def test_every_field_refuses_the_other_type():
    assert len(FIELDS) > 300
    for model, name, value, expected in FIELDS:
        with pytest.raises(ValueError, match=name) as refusal:
            model.__pydantic_validator__.validate_assignment(model.model_construct(), name, value)
        assert expected & {error["type"] for error in refusal.value.errors()}, (model, name)


MODULE = {"name": "m", "config": {"d_model": 8, "num_heads": 2}}
PATTERNS = {"stored": [[1.0, 1.0]], "states": [[1.0, 0.0]]}
COST = {"num_heads": 2, "head_dim": 4, "shape": {"queries": 4}}


@pytest.mark.parametrize(
    ("model", "data", "field"),
    [
        (CreateModule, MODULE | {"seed": False}, "seed"),
        (CreateModule, MODULE | {"seed": "5"}, "seed"),
        (CreateModule, MODULE | {"durable": "yes"}, "durable"),
        (CreateModule, MODULE | {"config": {"d_model": 8, "num_heads": True}}, "config.num_heads"),
        (HopfieldRequest, PATTERNS | {"return_association": 0}, "return_association"),
        (HopfieldRequest, PATTERNS | {"beta": "1.5"}, "beta"),
        (RawComplexityRequest, COST | {"shape": {"queries": True}}, "shape.queries"),
        (RawComplexityRequest, COST | {"compare": [{"num_heads": 2**31 - 2}]}, "compare.0.num_heads"),
        (RawComplexityRequest, COST | {"sweep": {"dimension": "head_dim", "values": [2, 2**31 - 2]}}, "sweep.values"),
    ],
)
def test_the_field_is_named(model, data, field):
    with pytest.raises(InvalidRequest) as refusal:
        validate(model, data)
    assert refusal.value.param == field


def test_what_means_the_same_is_taken():
    assert validate(CreateModule, MODULE | {"seed": np.int64(3), "durable": np.bool_(False)}).seed == 3
    assert validate(CreateModule, MODULE | {"seed": 3.0}).seed == 3
    assert validate(HopfieldRequest, PATTERNS | {"beta": 2}).beta == 2


def test_a_query_string_has_text():
    (operation,) = (each for each in OPERATIONS if each.request is ParameterQuery)
    assert operation.method == "GET"
    assert validate(ParameterQuery, {"head": "1"}).head == 1
