"""config.json: defaults that it leaves out, its older forms, parts for several stacks, and entries that are refused."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.modules.checkpoints.refused import REFUSED
from tests.modules.checkpoints.test_families import TINY, built, saved

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.positions import Llama3Scaling, Rope, YarnScaling
from attention_contract.schemas.modules import ImportModule
from attention_contract.spec import Causal, Softmax
from attention_service.modules.checkpoints.families import FAMILIES, INEXACT
from attention_service.modules.checkpoints.family import Entries, described
from attention_service.modules.checkpoints.import_plan import plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import CONFIG_MAPPING

MODEL_TYPES = sorted((kind, family.name) for family in FAMILIES.values() for kind in family.model_types)


def descriptions(family, config, layers=(0, 1, 2, 5)):
    """What a family says of each of its blocks."""
    return [
        described(family, Entries(config, layer, names.part or "self", names.stack, frozenset()))
        for names in family.blocks
        for layer in layers
    ]


def complete(kind, config=None):
    """The config with every entry, in its newest form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = CONFIG_MAPPING[kind].from_dict(config or {})
    return json.loads(whole.to_json_string(use_diff=False))


@pytest.mark.parametrize(("kind", "name"), MODEL_TYPES)
def test_an_entry_that_is_left_out_has_the_default_of_its_class(kind, name):
    try:
        short = descriptions(FAMILIES[name], {"model_type": kind})
    except InvalidCheckpoint:
        return  # refused, or asked for
    for found, expected in zip(short, descriptions(FAMILIES[name], complete(kind)), strict=True):
        assert found.spec == expected.spec
        if found.heads is not None:  # else the import asks for it
            assert found == expected


@pytest.mark.parametrize(("kind", "name"), MODEL_TYPES)
def test_an_entry_under_the_common_name_of_transformers_means_the_same(kind, name):
    for alias, own in CONFIG_MAPPING[kind].attribute_map.items():
        value = complete(kind).get(own)
        if alias not in {"num_attention_heads", "hidden_size"} or not isinstance(value, int):
            continue
        config = {"model_type": kind, alias: 2 * value}
        try:
            short = descriptions(FAMILIES[name], config)
        except InvalidCheckpoint:
            continue
        assert short == descriptions(FAMILIES[name], complete(kind, config)), alias


def test_a_mistral_with_types_of_layers_is_a_ministral_as_in_transformers(store, tmp_path):
    store("mistral", {"layer_types": ["sliding_attention", "full_attention"]})
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "net")).__name__ == "MinistralConfig"
    windows = [plan(tmp_path, ImportModule(checkpoint="net", layer=layer)).config.spec.masks for layer in (0, 1)]
    assert [len(masks) for masks in windows] == [2, 1]


LENGTHS = {"max_position_embeddings": 131072}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}} | LENGTHS),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}} | LENGTHS),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
        ("gemma3_text", {"rope_local_base_freq": 5e3, "rope_theta": 2e6,
                         "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | LENGTHS | YARN),
        ("qwen2", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0} | LENGTHS | YARN),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}} | LENGTHS | YARN),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1}),
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
        ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 500.0}),
        ("glm4", {"partial_rotary_factor": 0.25}),
    ],
)  # fmt: skip
def test_an_older_form_means_the_same_as_the_newest(kind, config):
    family = FAMILIES[dict(MODEL_TYPES)[kind]]
    older = descriptions(family, {"model_type": kind, **config})
    assert older == descriptions(family, complete(kind, config))
    assert older != descriptions(family, {"model_type": kind})


def test_scaling_is_read_in_full():
    config = {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}
    (first,) = descriptions(FAMILIES["llama"], config, layers=[0])
    assert first.spec.position == Rope(theta=5e5, scaling=Llama3Scaling(**LLAMA3))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
    (first,) = descriptions(FAMILIES["llama"], {"rope_scaling": yarn} | LENGTHS, layers=[0])
    assert isinstance(first.spec.position.scaling, YarnScaling)
    assert (first.spec.position.scaling.beta_fast, first.spec.position.scaling.truncate) == (16.0, False)
    assert first.spec.position.scaling.attention_factor == pytest.approx(0.9753, abs=1e-3)


@pytest.fixture
def store(tmp_path):
    """Save the tiny model of a family, with entries of its config.json changed."""

    def kept(family, changes=None, place="net"):
        tiny = next(tiny for tiny in TINY if tiny.family == family)
        saved(built(tiny), tmp_path / place)
        path = tmp_path / place / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | (changes or {})))
        return config

    return kept


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case.family}-{case.entry}")
def test_a_computation_that_modules_do_not_have_is_refused_by_its_entry(store, tmp_path, case):
    store(case.family, case.config)
    with pytest.raises(InvalidCheckpoint, match=rf"config\.json says {case.entry}") as caught:
        plan(tmp_path, ImportModule(checkpoint="net"))
    assert caught.value.param == "checkpoint"


@pytest.mark.parametrize("value", [0, "four", True, 2.5, [4]])
def test_an_entry_of_another_kind_is_refused_by_its_name(store, tmp_path, value):
    store("llama", {"num_attention_heads": value})
    with pytest.raises(InvalidCheckpoint, match="num_attention_heads"):
        plan(tmp_path, ImportModule(checkpoint="net"))


HOSTILE = [0, -1, 0.5, 1e400, True, "x", "", [], [[]], {}, {"rope_type": []}, {"rope_type": "yarn", "factor": "x"}]


@pytest.mark.sampled(kind=12, name=1)
@pytest.mark.parametrize(("kind", "name"), MODEL_TYPES)
def test_no_entry_breaks_the_description(kind, name):
    whole = complete(kind)
    for entry in whole:
        for value in HOSTILE:
            try:
                descriptions(FAMILIES[name], whole | {entry: value}, layers=(0, 5))
            except InvalidCheckpoint as fault:
                assert fault.param == "checkpoint"  # noqa: PT017 - it may also be described


@pytest.mark.parametrize("family", ["bert", "llama", "bart", "gpt2"])
@pytest.mark.parametrize("kind", ["deberta-v2", "deepseek_v32", "blenderbot", "xlnet"])
def test_a_model_type_of_no_family_is_refused(store, tmp_path, family, kind):
    store(family, {"model_type": kind})
    with pytest.raises(InvalidCheckpoint, match=f"model_type '{kind}', which is not known") as caught:
        plan(tmp_path, ImportModule(checkpoint="net"))
    assert (INEXACT.get(kind, "no reason") in caught.value.detail) == (kind in INEXACT)


@pytest.mark.parametrize("value", [[], {}, 3])
def test_a_model_type_that_is_no_text_is_refused(store, tmp_path, value):
    store("llama", {"model_type": value})
    with pytest.raises(InvalidCheckpoint, match="model_type"):
        plan(tmp_path, ImportModule(checkpoint="net"))


def test_a_part_of_the_config_describes_its_stack(store, tmp_path):
    config = store("gemma3")
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    (tmp_path / "pair").mkdir()
    save_file(
        {f"language_model.model.{name}": value for name, value in tensors.items()}, tmp_path / "pair" / "a.safetensors"
    )
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {"model_type": "unheard of"}}
    (tmp_path / "pair" / "config.json").write_text(json.dumps(whole))
    own = plan(tmp_path, ImportModule(checkpoint="net", layer=1))
    text = plan(tmp_path, ImportModule(checkpoint="pair", layer=1, stack="text"))
    assert text.config == own.config
    assert text.source.stack == "text"
    assert all(torch.equal(value, own.read()[name]) for name, value in text.read().items())


@pytest.fixture
def pair_of(tmp_path):
    """Save a tiny pair of a text and a vision model, and return its folder."""

    def kept(name):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 8, "attn_implementation": "eager"}
        text = sizes | {"num_attention_heads": 4, "vocab_size": 20, "max_position_embeddings": 8}
        vision = sizes | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / "pair")
        return tmp_path / "pair"

    return kept


PAIRS = [("CLIP", "clip-text", "clip-vision", [Causal()]), ("Siglip", "siglip", "siglip", [])]


@pytest.mark.parametrize(("name", "text", "vision", "masks"), PAIRS)
@pytest.mark.parametrize("typed", [True, False])
def test_a_pair_of_text_and_vision_has_both_stacks(pair_of, tmp_path, name, text, vision, masks, typed):
    path = pair_of(name) / "config.json"
    if not typed:  # the type of the pair tells those of its sections
        config = json.loads(path.read_text())
        del config["text_config"]["model_type"], config["vision_config"]["model_type"]
        path.write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="choose one with stack"):
        plan(tmp_path, ImportModule(checkpoint="pair"))
    for stack, heads, family, own in (("text", 4, text, masks), ("vision", 2, vision, [])):
        made = plan(tmp_path, ImportModule(checkpoint="pair", stack=stack))
        assert (made.config.num_heads, made.config.spec.masks) == (heads, own)
        assert made.source.family == family


def test_a_pair_of_a_type_of_no_family_is_refused_by_that_type(pair_of, tmp_path):
    path = pair_of("CLIP") / "config.json"
    config = json.loads(path.read_text())
    for section in ("text_config", "vision_config"):
        del config[section]["model_type"]
    path.write_text(json.dumps(config | {"model_type": "chinese_clip"}))
    with pytest.raises(InvalidCheckpoint, match="model_type 'chinese_clip', which is not known"):
        plan(tmp_path, ImportModule(checkpoint="pair", stack="text"))


def test_vit_is_known_by_its_older_names(store, tmp_path):
    store("vit")
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    old = {
        "q_proj": "attention.query",
        "k_proj": "attention.key",
        "v_proj": "attention.value",
        "o_proj": "output.dense",
    }
    renamed = {}
    for name, value in tensors.items():
        for new, former in old.items():
            name = name.replace(f"attention.{new}.", f"attention.{former}.")  # noqa: PLW2901
        renamed[re.sub(r"^(vit\.)?(encoder\.)?layers?\.", "vit.encoder.layer.", name)] = value
    (tmp_path / "older").mkdir()
    save_file(renamed, tmp_path / "older" / "model.safetensors")
    (tmp_path / "older" / "config.json").write_text((tmp_path / "net" / "config.json").read_text())
    new, older = (plan(tmp_path, ImportModule(checkpoint=place, layer=1)) for place in ("net", "older"))
    assert any("encoder.layer.1.attention.attention.query.weight" in name for name in renamed)
    assert older.config == new.config
    assert all(torch.equal(value, new.read()[name]) for name, value in older.read().items())


def test_shards_and_one_file_give_the_same_parameters(tmp_path):
    tiny = next(tiny for tiny in TINY if tiny.family == "t5" and tiny.label == "decoder-self")
    model = built(tiny)
    saved(model, tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="8KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = (plan(tmp_path, ImportModule(checkpoint=place, **tiny.request)) for place in ("whole", "parts"))
    assert whole.config == parts.config
    assert all(torch.equal(value, whole.read()[name]) for name, value in parts.read().items())


def test_the_fields_of_a_spec_replace_those_of_the_checkpoint(store, tmp_path):
    store("qwen3")
    own = plan(tmp_path, ImportModule(checkpoint="net")).config.spec
    laid = plan(tmp_path, ImportModule(checkpoint="net", spec={"softcap": 5.0, "masks": []}))
    assert laid.config.spec == own.model_copy(update={"softcap": 5.0, "masks": []})
    bare = plan(tmp_path, ImportModule(checkpoint="net", spec={"qk_norm": None}))
    assert "q_norm.weight" not in bare.read()
    assert plan(tmp_path, ImportModule(checkpoint="net", spec={})).config.spec == own
    with pytest.raises(InvalidRequest, match=r"sinks missing") as caught:
        plan(tmp_path, ImportModule(checkpoint="net", spec={"normalizer": {"sinks": True}}))
    assert caught.value.param == "spec"
    with pytest.raises(InvalidRequest, match="method linear") as caught:
        plan(tmp_path, ImportModule(checkpoint="net", spec={"method": {"name": "linear"}, "softcap": 5.0}))
    assert caught.value.param.startswith("spec")


def test_a_fact_that_no_state_dict_tells_is_requested(tmp_path):
    attention = torch.nn.MultiheadAttention(8, 2)
    save_file(attention.state_dict(), tmp_path / "alone.safetensors")
    with pytest.raises(InvalidRequest, match=r'"spec": {"masks": \[\], "add_zero_attn": false}') as caught:
        plan(tmp_path, ImportModule(checkpoint="alone.safetensors", num_heads=2))
    assert caught.value.param == "spec.masks"
    with pytest.raises(InvalidRequest) as caught:
        plan(tmp_path, ImportModule(checkpoint="alone.safetensors", num_heads=2, spec={"masks": []}))
    assert (caught.value.param, caught.value.facts) == ("spec.add_zero_attn", {"missing": ["spec.add_zero_attn"]})
    expected = {"masks": [{"name": "causal"}], "add_zero_attn": True}
    made = plan(tmp_path, ImportModule(checkpoint="alone.safetensors", num_heads=2, spec=expected)).config.spec
    assert (made.masks, made.add_zero_attn, made.normalizer) == ([Causal()], True, Softmax())
    layer = torch.nn.TransformerDecoderLayer(8, 2, 16)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    with pytest.raises(InvalidRequest) as caught:
        plan(tmp_path, ImportModule(checkpoint="layer.safetensors", num_heads=2))
    assert caught.value.facts == {"missing": ["spec.masks"]}
    cross = plan(tmp_path, ImportModule(checkpoint="layer.safetensors", num_heads=2, part="cross"))
    assert cross.config.spec.masks == []
