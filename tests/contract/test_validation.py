"""A refusal names the field as the caller wrote it, says what was expected, and stays short."""

import pytest

from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.costs.complexity import ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.modules import CreateModule, ImportModule, ReplaceParameters
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_contract.validation import validate

LONG = "x" * 10**6
LLAMA3 = {"name": "llama3", "factor": 8, "original_max_position_embeddings": 8192}
LONGROPE = {
    "name": "longrope", "short_factor": [1], "long_factor": [1, 2], "factor": 2, "original_max_position_embeddings": 8,
}  # fmt: skip
PATTERNS = {"stored": [[1.0]], "states": [[1.0]]}
MODULE = {"name": "m", "config": {"d_model": 8, "num_heads": 2}}


def refuses(model, data):
    with pytest.raises(InvalidRequest) as caught:
        validate(model, data)
    error = caught.value
    assert len(error.detail) < 400
    assert sum(map(len, error.facts.get("also", []))) < 3000
    return error


def raw(**fields):
    return {"query": [[1.0]]} | fields


def any_of(*masks):
    return {"name": "any", "of": list(masks)}


CASES = [
    (ForwardRequest, {}, "query", "required"),
    (ForwardRequest, raw(qurey=1), "qurey", "no such field"),
    (ForwardRequest, raw(spec={}), "spec", "no such field"),
    (ForwardRequest, raw(**{"return": ["wieghts"]}), "return.0", "'weights'"),
    (ForwardRequest, raw(**{"return": []}), "return", "at least 1"),
    (ForwardRequest, raw(edits=[{"tap": "lse", "set": 0}]), "edits.0.tap", "'weights'"),
    (ForwardRequest, raw(edits=[{"tap": "scores"}]), "edits.0", "exactly one"),
    (ForwardRequest, raw(edits=[{"tap": "scores", "set": 0, "scale": 1}]), "edits.0.scale", "exactly one"),
    (ForwardRequest, raw(edits=[{"tap": "scores", "scale": 1, "add": [2.0]}]), "edits.0.add", "scale and add"),
    (
        ForwardRequest,
        raw(edits=[{"tap": "scores", "set": 0, "renormalize": True}]),
        "edits.0.renormalize",
        "weights only",
    ),
    (ForwardRequest, raw(edits=[{"tap": "q", "value": [1, [2]]}]), "edits.0.value", "ragged"),
    (ForwardRequest, raw(edits=[{"tap": "q", "set": 0}] * 257), "edits", "at most 256"),
    (ForwardRequest, raw(select={"heads": [-1]}), "select.heads.0", "greater"),
    (ForwardRequest, raw(select={"heads": []}), "select.heads", "at least 1"),
    (ForwardRequest, raw(kernel=3), "kernel", "string"),
    (ForwardRequest, raw(version=LONG), "version", "at most 256"),
    (ForwardRequest, raw(key_lengths=[1.5]), "key_lengths", "int64"),
    (RawForwardRequest, raw(parameters={"score.weight": "x"}), "parameters.score.weight", "number"),
    (RawForwardRequest, raw(spec={"score": {"name": "cosmic"}}), "spec.score", "'scaled_dot'"),
    (RawForwardRequest, raw(spec={"score": {}}), "spec.score", "name"),
    (RawForwardRequest, raw(spec={"score": {"name": "dot", "scale": 2}}), "spec.score.scale", "no such field"),
    (RawForwardRequest, raw(spec={"score": {"name": "scaled_dot", "scale": "NaN"}}), "spec.score.scale", "finite"),
    (RawForwardRequest, raw(spec={"softcap": 0}), "spec.softcap", "greater than or equal"),
    (RawForwardRequest, raw(spec={"masks": {"name": "causal"}}), "spec.masks", "list"),
    (RawForwardRequest, raw(spec={"masks": [{"name": "casual"}]}), "spec.masks.0", "'causal'"),
    (RawForwardRequest, raw(spec={"masks": [{"name": "causal", "align": "x"}]}), "spec.masks.0.align", "top_left"),
    (RawForwardRequest, raw(spec={"masks": [any_of()]}), "spec.masks.0.of", "at least 1"),
    (RawForwardRequest, raw(spec={"masks": [any_of({"name": "x"})]}), "spec.masks.0.of.0", "'global_tokens'"),
    (
        RawForwardRequest,
        raw(spec={"masks": [{"name": "causal"}, any_of(any_of({"name": "sliding_window", "left": -1}))]}),
        "spec.masks.1.of.0.of.0.left",
        "greater",
    ),
    (
        RawForwardRequest,
        raw(spec={"masks": [{"name": "global_tokens", "positions": [0, -1]}]}),
        "spec.masks.0.positions.1",
        "greater",
    ),
    (
        RawForwardRequest,
        raw(spec={"normalizer": {"name": "softmax", "temperature": 0}}),
        "spec.normalizer.temperature",
        "0",
    ),
    (
        RawForwardRequest,
        raw(spec={"normalizer": {"name": "softmax", "dtype": "int8"}}),
        "spec.normalizer.dtype",
        "float32",
    ),
    (RawForwardRequest, raw(spec={"normalizer": {"bias": 1}}), "spec.normalizer.bias", "no such field"),
    (RawForwardRequest, raw(spec={"normalizer": {"name": "softmin"}}), "spec.normalizer", "'entmax15'"),
    (
        RawForwardRequest,
        raw(spec={"normalizer": {"name": "sigmoid", "bias": "NaN"}}),
        "spec.normalizer.bias",
        "finite",
    ),
    *(
        (RawForwardRequest, raw(spec={"position": {"name": name, **options}}), f"spec.position{field}", fault)
        for name, options, field, fault in [
            ("rop", {}, "", "'rope'"),
            ("sinusoidal", {"theta": -1}, ".theta", "greater than 1"),
            ("learned", {}, ".length", "required"),
            ("rope", {"dim": 3}, ".dim", "multiple of 2"),
            ("rope", {"style": "thirds"}, ".style", "'interleaved'"),
            ("rope", {"scaling": {"name": "linear", "factor": 0.5}}, ".scaling.factor", "greater"),
            ("rope", {"scaling": {"name": "longer", "factor": 2}}, ".scaling", "'yarn'"),
            (
                "rope",
                {"scaling": {"name": "yarn", "factor": 2}},
                ".scaling.original_max_position_embeddings",
                "required",
            ),
            ("rope", {"dim": 2, "scaling": {"name": "ntk", "factor": 2}}, "", "4 or more"),
            ("rope", {"scaling": LONGROPE}, ".scaling", "one for each pair"),
            ("alibi", {"slopes": [1]}, ".slopes", "no such field"),
            ("relative_bias", {"num_buckets": 7}, "", "make it even"),
            ("relative_bias", {"num_buckets": 2}, "", "4 or more"),
            ("relative_bias", {"max_distance": 8}, "", "make it larger"),
        ]
    ),
    (
        RawForwardRequest,
        raw(spec={"position": {"name": "rope", "scaling": {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 4}}}),
        "spec.position.scaling.high_freq_factor",
        "make it larger",
    ),
    (RawForwardRequest, raw(spec={"qk_norm": {"eps": 0}}), "spec.qk_norm.eps", "greater"),
    (RawForwardRequest, raw(spec={"qk_norm": {"over": "tokens"}}), "spec.qk_norm.over", "'all_heads'"),
    (RawGradientsRequest, raw(wrt=[]), "wrt", "at least 1"),
    (RawGradientsRequest, raw(wrt=[LONG]), "wrt.0", "at most 256"),
    (CreateModule, MODULE | {"name": "a/b"}, "name", "pattern"),
    (CreateModule, MODULE | {"name": LONG}, "name", "pattern"),
    (CreateModule, MODULE | {"name": "m\n"}, "name", "pattern"),
    (CreateModule, {"name": "seed", "config": {"d_model": 8}}, "config.num_heads", "required"),
    (CreateModule, {"name": "m", "config": {"d_model": 9, "num_heads": 2}}, "config.d_model", "multiple"),
    (
        CreateModule,
        {"name": "m", "config": {"d_model": 8, "num_heads": 4, "num_kv_heads": 3}},
        "config.num_kv_heads",
        "3 does not divide",
    ),
    (CreateModule, {"name": "m", "config": {"d_model": 8, "num_heads": 2, "bias": "maybe"}}, "config.bias", "boolean"),
    (CreateModule, MODULE | {"seed": -1}, "seed", "greater"),
    (CreateModule, MODULE | {"seed": 1, "parameters": {}}, "seed", "both"),
    (ReplaceParameters, {"parameters": {}}, "parameters", "at least 1"),
    (ImportModule, {"checkpoint": ""}, "checkpoint", "at least 1"),
    (ImportModule, {"checkpoint": "c", "part": "both"}, "part", "'cross'"),
    (ComplexityRequest, {"shape": {"queries": 0}}, "shape.queries", "greater"),
    (ComplexityRequest, {"shape": {"queries": 1}, "sweep": {"values": [1, -1]}}, "sweep.values.1", "greater"),
    (ComplexityRequest, {"shape": {"queries": 1}, "sweep": {"values": [1]}}, "sweep.values", "at least 2"),
    (
        RawComplexityRequest,
        {"shape": {"queries": 1}, "num_heads": 4, "num_kv_heads": 3, "head_dim": 1},
        "num_kv_heads",
        "does not divide",
    ),
    (
        ComplexityRequest,
        {"shape": {"queries": 1}, "compare": [{}, {"spec": {"masks": [{"name": "fixed", "stride": 2, "summary": 3}]}}]},
        "compare.1.spec.masks.0.summary",
        "2 positions",
    ),
    (HopfieldRequest, PATTERNS | {"steps": 3, "eps": 0.1}, "steps", "exclude"),
    (HopfieldRequest, PATTERNS | {"max_steps": 3}, "max_steps", "send eps"),
]


@pytest.mark.parametrize(("model", "data", "param", "says"), CASES, ids=[f"{case[2]}-{case[3]}" for case in CASES])
def test_a_refusal_names_the_field_and_what_was_expected(model, data, param, says):
    error = refuses(model, data)
    assert error.param == param
    assert any(word in error.detail for word in says.split("|"))
    if param:
        assert error.detail.startswith(f"{param}: ")


UNIONS = [
    (ModelForwardRequest, {"text": []}, "text", "at least 1"),
    (ModelForwardRequest, {"text": ["a", ""]}, "text.1", "at least 1"),
    (ModelForwardRequest, {"tokens": [[1], []]}, "tokens.1", "at least 1"),
    (ModelForwardRequest, {"tokens": [[1], [2, -1]]}, "tokens.1.1", "greater"),
    (ModelForwardRequest, {"text": "a", "layers": []}, "layers", "at least 1"),
    (ModelForwardRequest, {"text": "a", "layers": [0, -1]}, "layers.1", "greater"),
    (ModelForwardRequest, {"text": "a", "layers": ["x"]}, "layers.0", "pattern"),
    (ModelForwardRequest, {"text": "a", "layers": "0"}, "layers", "'all'"),
    (ModelGradientsRequest, {"text": "a", "of": {"token": ""}}, "of.token", "at least 1"),
    (ModelGradientsRequest, {"text": "a", "of": {"position": "a"}}, "of.position", "integer"),
    (ModelGradientsRequest, {"text": "a", "of": {"upstream": [["a"]]}}, "of.upstream", "number"),
    (CompletionRequest, {"model": "a", "prompt": ["a", ""]}, "prompt.1", "at least 1"),
    (CompletionRequest, {"model": "a", "prompt": [[1], []]}, "prompt.1", "at least 1"),
    (
        ChatCompletionRequest,
        {"model": "a", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0.image_url",
        "object",
    ),
]


@pytest.mark.parametrize(("model", "data", "param", "says"), UNIONS, ids=[str(case[1]) for case in UNIONS])
def test_of_fields_with_several_forms_the_fault_of_the_form_that_came_is_reported(model, data, param, says):
    error = refuses(model, data)
    assert error.param == param
    assert says in error.detail


def test_a_field_that_is_only_half_right_is_named_among_the_others():
    error = refuses(CreateModule, {"name": "m", "config": {"d_model": 8, "num_heads": 2, "bias": {"q": True}}})
    assert "config.bias.q" in [error.param, *error.facts["also"]]


def test_further_faults_are_listed_by_their_fields_up_to_eight():
    error = refuses(RawForwardRequest, raw(**{f"x{n}": 1 for n in range(100)}))
    assert error.param == "x0"
    assert error.facts["also"] == [f"x{n}" for n in range(1, 9)]


@pytest.mark.parametrize(
    "data",
    [
        LONG,
        [1.0] * 10**5,
        {LONG: 1},
        {LONG + str(n): 1 for n in range(3)},
        raw(kernel=LONG),
        raw(parameters={LONG: "x"}),
        raw(parameters=LONG),
        raw(edits=[LONG]),
        raw(select={LONG: 1}),
        raw(spec=LONG),
        raw(spec={LONG: 1}),
        raw(spec={"score": {"name": LONG}}),
        raw(spec={"masks": [{"name": LONG}]}),
        raw(**{"return": [LONG] * 3}),
    ],
    ids=range(14),
)
def test_a_megabyte_of_bad_input_is_not_echoed(data):
    error = refuses(RawForwardRequest, data)
    assert len(error.param or "") < 250
    assert len(str(error.to_problem())) < 2000


@pytest.mark.parametrize("depth", [300, 5000])
def test_masks_nested_too_deep_are_refused(depth):
    mask = {"name": "causal"}
    for _ in range(depth):
        mask = any_of(mask)
    refuses(RawForwardRequest, raw(spec={"masks": [mask]}))


def test_a_tensor_at_fault_is_an_invalid_tensor():
    with pytest.raises(InvalidTensor):
        validate(RawForwardRequest, {"query": [[1.0], 2.0]})


def test_what_is_no_object_is_refused_without_a_field():
    assert refuses(RawForwardRequest, [1]).param is None


@pytest.mark.parametrize(
    ("data", "param", "others"),
    [
        (raw(select={"heads": ["x"] * 9}), "select.heads.0", 0),
        (raw(**{"return": ["x"] * 9}), "return.0", 0),
        (raw(edits=[{"tap": "q", "heads": ["x"] * 9}, {"tap": "x"}]), "edits.0.heads.0", 0),
        (raw(spec={"masks": [{"name": "any", "of": [{}] * 9}] * 9}), "spec.masks.0.of.0", 0),
        (raw(select={"heads": ["x"], "queries": ["x"]}), "select.heads.0", 1),
    ],
)
def test_of_a_list_the_first_wrong_item_is_reported(data, param, others):
    error = refuses(RawForwardRequest, data)
    assert error.param == param
    assert len(error.facts.get("also", [])) == others


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (raw(select={"heads": [0] * 70_000}), "select.heads"),
        (raw(edits=[{"tap": "q", "set": 0, "queries": [0] * 70_000}]), "edits.0.queries"),
        (raw(**{"return": ["q"] * 65}), "return"),
    ],
)
def test_lists_are_no_longer_than_anybody_needs(data, param):
    assert refuses(RawForwardRequest, data).param == param


EDIT = {"tap": "context", "set": 0}


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"edits": {"0": [EDIT] * 257}}, "edits.0"),
        ({"edits": {str(layer): [EDIT] * 200 for layer in range(6)}}, "edits"),
        ({"layers": [0, "encoder.0", 0]}, "layers"),
        ({"positions": [-1] * 3000}, "positions"),
        ({"positions": [-1] * 300, "top_k": 60}, "positions"),
        ({"text": ["a"] * 100, "top_k": 200}, "top_k"),
    ],
)
def test_a_request_to_a_model_asks_for_no_more_than_can_be_reported(data, param):
    assert refuses(ModelForwardRequest, {"text": "a"} | data).param == param
    attention = {name: data[name] for name in ("layers", "edits") if name in data}
    if attention:
        assert (
            refuses(CompletionRequest, {"model": "a", "prompt": "a", "attention": attention}).param
            == f"attention.{param}"
        )


def test_what_a_model_can_report_may_be_requested():
    edits = {str(layer): [EDIT] * 256 for layer in range(4)}
    for more in ({"edits": edits}, {"positions": [-1] * 2730}, {"positions": [-1] * 16_384, "top_k": 0}):
        assert validate(ModelForwardRequest, {"text": "a"} | more)


def test_faults_too_many_to_name_are_counted():
    error = refuses(RawForwardRequest, raw(spec={f"f{index}": 0 for index in range(5000)}))
    assert (error.param, error.facts["count"]) == (None, 5000)


@pytest.mark.parametrize(
    ("data", "param", "message"),
    [
        ({"qeury": [[1.0]]}, "query", "there is no field 'qeury', did you mean 'query'?"),
        ({"query": [[1.0]], "retrun": ["output"]}, "retrun", "did you mean 'return'?"),
        ({"query": [[1.0]], "return": ["weigths"]}, "return.0", "did you mean 'weights'?"),
        ({"query": [[1.0]], "return_": ["weigths"]}, "return.0", "did you mean 'weights'?"),
        ({"query": [[1.0]], "select": {"haeds": [0]}}, "select.haeds", "did you mean 'heads'?"),
        ({"query": [[1.0]], "encoding": "zzz"}, "encoding", "unknown 'zzz'; expected one of"),
        ({"query": [[1.0]], "zzz": 1}, "zzz", "check its spelling"),
        ({}, "query", "this field is required"),
    ],
)
def test_a_misspelt_name_is_reported_with_the_right_one(data, param, message):
    with pytest.raises(InvalidRequest) as refusal:
        validate(ForwardRequest, data, by_name="return_" in data)
    assert refusal.value.param == param
    assert message in refusal.value.detail


@pytest.mark.parametrize(
    ("field", "given", "words"),
    [
        ("text", "", "expected at least 1 character; it is empty"),
        ("text", 3, "expected a valid string"),
        ("top_k", -1, "expected a number greater than or equal to 0"),
        ("top_k", 2.5, "expected a valid integer"),
        ("alone", "perhaps", "expected a valid boolean"),
        ("positions", 3, "expected a valid list"),
    ],
)
def test_a_fault_of_a_field_says_what_was_expected(field, given, words):
    with pytest.raises(InvalidRequest) as refused:
        validate(ModelForwardRequest, {"text": "the cat"} | {field: given})
    assert refused.value.param == field
    assert words in refused.value.detail
