"""Every field of the spec has its default, and a spec says the same after a trip over the wire."""

import json
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_contract import AttentionSpec, wire
from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import EditableTap, ForwardRequest, RawForwardRequest, Tap
from attention_contract.schemas.modules import CreateModule, ImportModule
from attention_contract.spec import Entmax15, Softmax
from attention_contract.validation import validate

sizes = st.none() | st.integers(0, 2**31 - 1)
blocks = st.integers(1, 2**31 - 1)
positive = st.floats(1e-6, 1e6)
leaf_masks = (
    st.fixed_dictionaries({"name": st.just("causal"), "align": st.sampled_from(["top_left", "bottom_right"])})
    | st.fixed_dictionaries({"name": st.just("sliding_window"), "left": sizes, "right": sizes})
    | st.fixed_dictionaries(
        {"name": st.just("global_tokens"), "positions": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)}
    )
    | st.fixed_dictionaries({"name": st.just("prefix_lm"), "length": st.integers(0, 2**31 - 1)})
    | st.fixed_dictionaries(
        {"name": st.just("block"), "size": blocks}, optional={"neighbours": st.integers(0, 2**31 - 1)}
    )
    | st.fixed_dictionaries({"name": st.just("strided"), "stride": blocks}, optional={"local": sizes})
    | st.fixed_dictionaries({"name": st.just("fixed"), "stride": st.integers(9, 99), "summary": st.integers(1, 9)})
    | st.fixed_dictionaries(
        {"name": st.just("random_blocks"), "size": blocks, "count": st.integers(1, 64)},
        optional={"seed": st.integers(0, 2**31 - 1)},
    )
    | st.fixed_dictionaries({"name": st.just("documents"), "lengths": st.lists(blocks, min_size=1, max_size=3)})
)
masks = st.recursive(
    leaf_masks,
    lambda inner: st.fixed_dictionaries(
        {"name": st.sampled_from(["any", "all"]), "of": st.lists(inner, min_size=1, max_size=3)}
    ),
    max_leaves=5,
)
factors = st.floats(1, 64)
lengths = st.integers(1, 2**31)
scalings = (
    st.fixed_dictionaries({"name": st.just("linear"), "factor": factors})
    | st.fixed_dictionaries(
        {"name": st.just("ntk"), "factor": factors}, optional={"original_max_position_embeddings": st.none() | lengths}
    )
    | st.fixed_dictionaries(
        {"name": st.just("llama3"), "factor": factors, "original_max_position_embeddings": lengths},
        optional={"low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(3, 9)},
    )
    | st.fixed_dictionaries(
        {"name": st.just("yarn"), "factor": factors, "original_max_position_embeddings": lengths},
        optional={
            "beta_fast": st.floats(8, 64),
            "attention_factor": st.none() | st.floats(0.5, 2),
            "truncate": st.booleans(),
        },
    )
)
positions = (
    st.fixed_dictionaries({"name": st.sampled_from(["none", "sinusoidal", "alibi", "relative_bias", "rope"])})
    | st.fixed_dictionaries({"name": st.just("learned"), "length": st.integers(1, 2**20)})
    | st.fixed_dictionaries(
        {"name": st.just("rope"), "dim": st.none() | st.integers(2, 64).map(lambda half: 2 * half)},
        optional={
            "theta": st.floats(2, 1e9),
            "style": st.sampled_from(["half", "interleaved"]),
            "scaling": st.none() | scalings,
        },
    )
    | st.fixed_dictionaries({"name": st.just("alibi"), "symmetric": st.booleans()})
    | st.fixed_dictionaries(
        {"name": st.just("relative_bias"), "num_buckets": st.integers(2, 64).map(lambda half: 2 * half)},
        optional={"max_distance": st.integers(128, 2**31 - 1), "bidirectional": st.booleans()},
    )
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "score": st.just({"name": "dot"})
        | st.fixed_dictionaries({"name": st.just("scaled_dot"), "scale": st.none() | st.floats(-1e6, 1e6)}),
        "softcap": st.none() | positive,
        "position": positions,
        "qk_norm": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "eps": st.floats(1e-9, 1),
                "over": st.sampled_from(["head", "all_heads"]),
                "unit_offset": st.booleans(),
            },
        ),
        "masks": st.lists(masks, max_size=3),
        "normalizer": st.fixed_dictionaries({"temperature": positive})
        | st.fixed_dictionaries(
            {"name": st.sampled_from(["softmax", "sparsemax", "entmax15", "sigmoid"]), "temperature": positive}
        )
        | st.fixed_dictionaries({"name": st.just("sigmoid"), "bias": st.none() | st.floats(-1e6, 1e6)}),
    },
)


def test_an_empty_object_is_a_spec_with_the_documented_defaults():
    assert AttentionSpec.model_validate({}).model_dump() == {
        "score": {"name": "scaled_dot", "scale": None},
        "softcap": None,
        "position": {"name": "none"},
        "qk_norm": None,
        "masks": [],
        "add_bias_kv": False,
        "add_zero_attn": False,
        "normalizer": {"name": "softmax", "temperature": 1.0, "dtype": "float32", "sinks": False},
        "method": {"name": "exact"},
    }
    assert AttentionSpec() == AttentionSpec.model_validate({})


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"dtype": "float64"}])
def test_a_normalizer_without_a_name_is_a_softmax(options):
    for spec in (
        AttentionSpec.model_validate({"normalizer": options}),
        AttentionSpec.model_validate_json(json.dumps({"normalizer": options})),
    ):
        assert spec.normalizer == Softmax(**options)
    assert AttentionSpec(normalizer=Entmax15()).normalizer == Entmax15()
    schemas = AttentionSpec.model_json_schema()
    union = [schemas["$defs"][each["$ref"].rpartition("/")[2]] for each in schemas["properties"]["normalizer"]["oneOf"]]
    assert [each["title"] for each in union if "name" not in each.get("required", ())] == ["Softmax"]


def test_a_causal_mask_is_top_left_and_a_window_unlimited_unless_told_otherwise():
    spec = AttentionSpec.model_validate({"masks": [{"name": "causal"}, {"name": "sliding_window"}]})
    assert spec.masks[0].align == "top_left"
    assert (spec.masks[1].left, spec.masks[1].right) == (None, None)


def test_a_summary_is_no_longer_than_its_block():
    with pytest.raises(InvalidRequest, match="5 positions") as refused:
        validate(AttentionSpec, {"masks": [{"name": "fixed", "stride": 5, "summary": 6}]})
    assert refused.value.param == "masks.0.summary"
    validate(AttentionSpec, {"masks": [{"name": "fixed", "stride": 5, "summary": 5}]})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_a_spec_survives_json_and_the_wire(data):
    spec = validate(AttentionSpec, data)
    assert AttentionSpec.model_validate_json(spec.model_dump_json()) == spec
    assert wire.from_body(AttentionSpec, wire.to_json(spec), wire.JSON, "request") == spec
    for media_type in wire.MEDIA_TYPES:
        request = RawForwardRequest.model_validate({"query": [[1.0]], "spec": spec})
        body = b"".join(wire.to_body(request, media_type, "request"))
        assert wire.from_body(RawForwardRequest, body, media_type, "request").spec == spec


def test_a_spec_is_immutable_and_counts_as_its_value():
    with pytest.raises(ValueError, match="frozen"):
        AttentionSpec().softcap = 1.0
    assert AttentionSpec.model_validate({"softcap": 30}) == AttentionSpec.model_validate({"softcap": 30.0})


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (
            AttentionSpec,
            {
                "score": {"name": "scaled_dot", "scale": None},
                "softcap": None,
                "position": {"name": "none"},
                "masks": [{"name": "causal", "align": "top_left"}],
                "normalizer": {"name": "softmax", "temperature": 1.0, "dtype": "float32"},
                "method": {"name": "exact"},
            },
        ),
        (
            AttentionSpec,
            {
                "masks": [
                    {
                        "name": "any",
                        "of": [
                            {"name": "sliding_window", "left": 2, "right": 2},
                            {"name": "global_tokens", "positions": [0]},
                        ],
                    }
                ]
            },
        ),
        (
            ForwardRequest,
            {
                "query": [[1.0]],
                "edits": [
                    {"tap": "weights", "heads": [3], "queries": [0], "keys": [0], "set": 0, "renormalize": False},
                    {"tap": "weights", "value": [1.0]},
                    {"tap": "weights", "scale": 0.5, "renormalize": True},
                ],
                "return": ["output", "weights"],
                "select": {"heads": [0], "queries": [0]},
                "average_heads": False,
            },
        ),
        (CreateModule, {"name": "m", "config": {"d_model": 8, "num_heads": 2, "bias": {"q_proj": True}}, "seed": 1}),
        (
            CreateModule,
            {"name": "m", "config": {"d_model": 8, "num_heads": 2}, "parameters": {"q_proj.weight": [[1.0]]}},
        ),
        (ImportModule, {"checkpoint": "bart", "layer": 0, "part": "cross", "stack": "decoder"}),
    ],
    ids=["whole_spec", "longformer", "forward", "seed", "parameters", "import"],
)
def test_the_examples_of_the_design_are_valid(model, data):
    validate(model, data)


def test_every_tap_of_the_design_may_be_returned_and_all_but_lse_edited():
    names = ["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "output"]
    assert {*names, "lse"} == set(get_args(Tap))
    assert set(names) == set(get_args(EditableTap))
    assert ForwardRequest.model_validate({"query": [1.0]}).return_ == ["output"]


def models(root=WireModel):
    for child in root.__subclasses__():
        if child.__module__.startswith("attention_contract."):
            yield child
        yield from models(child)


@pytest.mark.parametrize("model", sorted(set(models()), key=lambda model: model.__name__), ids=lambda m: m.__name__)
def test_null_means_the_default_so_leaving_nulls_out_loses_nothing(model):
    for name, field in model.model_fields.items():
        if type(None) in get_args(field.annotation):
            assert field.default is None, name


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_every_body_has_a_json_schema_whose_tensors_are_marked(mode):
    for operation in OPERATIONS:
        for model in filter(None, (operation.request, operation.reply)):
            json.dumps(model.model_json_schema(mode=mode))
    schema = RawForwardRequest.model_json_schema(mode=mode)
    assert schema["properties"]["query"]["x-tensor"] == "float"
