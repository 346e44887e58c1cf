"""Every field of the spec has its default, and a spec says the same after a trip over the wire."""

import json
from typing import get_args

import pytest

from attention_contract import AttentionSpec, wire
from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import EditableTap, ForwardRequest, RawForwardRequest, Tap
from attention_contract.schemas.modules import CreateModule, ImportModule
from attention_contract.spec import Entmax15, Softmax
from attention_contract.validation import validate

YARN = {"name": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "truncate": False}
LLAMA3 = {"name": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 5.0}
WINDOW = {"name": "sliding_window", "left": None, "right": 2}
SPECS = [
    {"score": {"name": "dot"}, "softcap": 2.0, "qk_norm": {"eps": 0.1, "over": "all_heads", "unit_offset": True}},
    {"score": {"name": "scaled_dot", "scale": -0.5}, "add_bias_kv": True, "add_zero_attn": True},
    {"score": {"name": "additive", "hidden": 3}, "normalizer": {"temperature": 0.5, "sinks": True}},
    {"score": {"name": "gaussian", "sigma": "learned"}, "normalizer": {"name": "sigmoid", "bias": -1.0}},
    {"score": {"name": "cosine", "scale": 3.0}, "normalizer": {"name": "entmax15", "temperature": 2.0}},
    {"score": {"name": "bilinear"}, "normalizer": {"name": "sparsemax"}},
    {"position": {"name": "learned", "length": 7}, "masks": [{"name": "causal", "align": "bottom_right"}]},
    {"position": {"name": "rope", "dim": 4, "theta": 50.0, "style": "interleaved", "scaling": YARN}},
    {"position": {"name": "rope", "scaling": LLAMA3}},
    {"position": {"name": "rope", "scaling": {"name": "ntk", "factor": 4.0}}},
    {"position": {"name": "rope", "scaling": {"name": "linear", "factor": 4.0}}},
    {"position": {"name": "alibi", "symmetric": False}},
    {"position": {"name": "relative_bias", "num_buckets": 8, "max_distance": 9, "bidirectional": False}},
    {"masks": [WINDOW, {"name": "global_tokens", "positions": [0, 2**31 - 1], "projections": "separate"}]},
    {"masks": [{"name": "prefix_lm", "length": 3}, {"name": "block", "size": 2, "neighbours": 1}]},
    {"masks": [{"name": "strided", "stride": 3, "local": 0}, {"name": "fixed", "stride": 9, "summary": 2}]},
    {"masks": [{"name": "random_blocks", "size": 2, "count": 3, "seed": 4}, {"name": "documents", "lengths": [1, 2]}]},
    {"masks": [{"name": "any", "of": [{"name": "all", "of": [WINDOW, {"name": "causal"}]}, WINDOW]}]},
    {"method": {"name": "linear", "rule": "gated_delta", "features": "identity"}, "masks": [{"name": "causal"}]},
    {"method": {"name": "performer", "features": 7}},
    {"method": {"name": "linformer", "rank": 3, "length": 400, "shared": True}},
    {"method": {"name": "nystrom", "landmarks": 3}},
]
"""Every member of every union, with options that are not its defaults."""


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


def test_a_causal_mask_is_top_left_and_a_window_unlimited_by_default():
    spec = AttentionSpec.model_validate({"masks": [{"name": "causal"}, {"name": "sliding_window"}]})
    assert spec.masks[0].align == "top_left"
    assert (spec.masks[1].left, spec.masks[1].right) == (None, None)


def test_a_summary_is_no_longer_than_its_block():
    with pytest.raises(InvalidRequest, match="5 positions") as refused:
        validate(AttentionSpec, {"masks": [{"name": "fixed", "stride": 5, "summary": 6}]})
    assert refused.value.param == "masks.0.summary"
    validate(AttentionSpec, {"masks": [{"name": "fixed", "stride": 5, "summary": 5}]})


@pytest.mark.parametrize("data", SPECS, ids=str)
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


EDITS = [
    {"tap": "weights", "heads": [3], "queries": [0], "keys": [0], "set": 0, "renormalize": False},
    {"tap": "weights", "value": [1.0]},
    {"tap": "weights", "scale": 0.5, "renormalize": True},
]
CONFIG = {"d_model": 8, "num_heads": 2, "bias": {"q_proj": True}}


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (ForwardRequest, {"query": [[1.0]], "edits": EDITS, "return": ["weights"], "select": {"heads": [0]}}),
        (CreateModule, {"name": "m", "config": CONFIG, "seed": 1}),
        (CreateModule, {"name": "m", "config": CONFIG, "parameters": {"q_proj.weight": [[1.0]]}}),
        (ImportModule, {"checkpoint": "bart", "layer": 0, "part": "cross", "stack": "decoder"}),
    ],
    ids=["forward", "seed", "parameters", "import"],
)
def test_the_examples_of_the_design_are_valid(model, data):
    validate(model, data)


def test_every_tap_of_the_design_may_be_returned_and_all_but_lse_edited():
    names = ["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "output"]
    assert {*names, "lse"} == set(get_args(Tap))
    assert {*names, "gate", "index_scores", "mlp", "router", "hidden", "embeddings"} == set(
        get_args(EditableTap)
    )  # the last six in whole models
    assert ForwardRequest.model_validate({"query": [1.0]}).return_ == ["output"]


def models(root=WireModel):
    for child in root.__subclasses__():
        if child.__module__.startswith("attention_contract."):
            yield child
        yield from models(child)


def test_null_means_the_default_so_leaving_nulls_out_loses_nothing():
    fields = [(model, name, field) for model in set(models()) for name, field in model.model_fields.items()]
    nullable = [each for each in fields if type(None) in get_args(each[2].annotation)]
    assert len(nullable) > 100
    assert [(model.__name__, name) for model, name, field in nullable if field.default is not None] == []


@pytest.mark.sampled(mode=1)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_every_body_has_a_json_schema_whose_tensors_are_marked(mode):
    for operation in OPERATIONS:
        for model in filter(None, (operation.request, operation.reply)):
            json.dumps(model.model_json_schema(mode=mode))
    schema = RawForwardRequest.model_json_schema(mode=mode)
    assert schema["properties"]["query"]["x-tensor"] == "float"
