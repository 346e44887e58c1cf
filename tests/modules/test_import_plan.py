import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.errors import CheckpointNotFound, InvalidCheckpoint, InvalidRequest, ModuleExists
from attention_contract.schemas.modules import Biases, ImportModule
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.multihead import project, project_out
from attention_service.modules.checkpoints import catalogue, hub
from attention_service.modules.checkpoints.checkpoint_files import open_checkpoint
from attention_service.modules.checkpoints.import_plan import default_name
from attention_service.modules.resident import making_bytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import BertConfig, BertModel, ElectraConfig, ElectraModel, RobertaConfig, RobertaModel


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def save(root):
    """Function that saves tensors and a config as a checkpoint."""

    def saved(tensors, config=None, folder="net", file="model.safetensors"):
        (root / folder).mkdir(exist_ok=True)
        tensors = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
        save_file({name: value.contiguous() for name, value in tensors.items()}, root / folder / file)
        if config is not None:
            (root / folder / "config.json").write_text(json.dumps(config))

    return saved


@pytest.fixture
def read(library):
    """Import the module of one layer, with no mask where the checkpoint says nothing, and check its estimate."""

    def imported(checkpoint="net", **options):
        request = ImportModule(checkpoint=checkpoint, **options)
        try:
            need = library.estimate(request)
        except InvalidRequest as fault:
            if not fault.param.startswith("spec."):
                raise
            answers = {field.removeprefix("spec."): NOTHING[field] for field in fault.facts["missing"]}
            request = ImportModule(checkpoint=checkpoint, spec=answers, **options)
            need = library.estimate(request)
        module, new = library.import_checkpoint(request)
        assert new
        assert need == making_bytes(module.config) > module.bytes
        return module

    return imported


NOTHING = {"spec.masks": [], "spec.add_zero_attn": False}


def attend(module, query, key=None, value=None, **options):
    key = query if key is None else key
    q, k, v = project(module.parameters, module.sizes, query, key, key if value is None else value)
    return project_out(module.parameters, scaled_dot_product_attention(q, k, v, **options))


def same(module, expected):
    assert set(module.parameters) == set(expected)
    return all(torch.equal(module.parameters[name], value) for name, value in expected.items())


# ── torch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("bias", "widths", "dtype"),
    [
        (False, {}, torch.float32),
        (True, {"kdim": 10, "vdim": 6}, torch.float64),
        (False, {"vdim": 6}, torch.float64),
        (True, {"vdim": 6}, torch.float32),
    ],
)
def test_a_multihead_attention_gives_its_output(save, read, bias, widths, dtype):
    original = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=dtype, **widths)
    if bias:
        nn.init.normal_(original.in_proj_bias)
        nn.init.normal_(original.out_proj.bias)
    save(original)
    module = read(num_heads=3)
    assert module.config.model_dump(include={"num_heads", "bias", "key_width", "value_width"}) == {
        "num_heads": 3,
        "bias": bias,
        "key_width": widths.get("kdim", 12),
        "value_width": widths.get("vdim", 12),
    }
    assert module.config.spec == AttentionSpec()
    assert module.source.model_dump() == {
        "checkpoint": "net",
        "family": "torch",
        "layer": 0,
        "part": "self",
        "stack": None,
        "adapter": None,
        "quantized": None,
        "ignored": [],
    }
    query = torch.randn(2, 5, 12, dtype=dtype)
    key = torch.randn(2, 7, widths.get("kdim", 12), dtype=dtype)
    value = torch.randn(2, 7, widths.get("vdim", 12), dtype=dtype)
    torch.testing.assert_close(attend(module, query, key, value), original(query, key, value)[0], atol=1e-6, rtol=0)


def torch_parameters(state, prefix):
    parameters = {
        f"{name}_proj.{kind}": part
        for kind in ("weight", "bias")
        for name, part in zip("qkv", state[f"{prefix}in_proj_{kind}"].chunk(3), strict=True)
    }
    return parameters | {f"o_proj.{kind}": state[f"{prefix}out_proj.{kind}"] for kind in ("weight", "bias")}


def test_layer_part_and_stack_select_every_layer_of_a_transformer(save, read):
    original = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    state = original.state_dict()
    save(original, {"nhead": 2})
    for stack, part, layers, name in [
        ("encoder", "self", 2, "self_attn"),
        ("decoder", "self", 3, "self_attn"),
        ("decoder", "cross", 3, "multihead_attn"),
    ]:
        for layer in range(layers):
            module = read(layer=layer, part=part, stack=stack, name=f"{stack}-{part}-{layer}")
            assert same(module, torch_parameters(state, f"{stack}.layers.{layer}.{name}."))
            assert (module.source.stack, module.source.part, module.source.layer) == (stack, part, layer)
            assert module.config.bias is True


def test_a_request_must_choose_between_two_stacks(save, read):
    save(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), {"nhead": 2})
    with pytest.raises(InvalidRequest, match="of its decoder and its encoder; choose one with stack") as caught:
        read()
    assert (caught.value.param, caught.value.facts["stacks"]) == ("stack", ["decoder", "encoder"])
    assert read(part="cross").source.stack == "decoder"  # only the decoder has cross-attention
    with pytest.raises(InvalidCheckpoint, match="only decoder cross-attention and decoder self-attention and encoder"):
        read(part="cross", stack="encoder")


@pytest.mark.parametrize("prefix", ["", "layers.0.self_attn."])
def test_a_learned_key_and_value_are_imported(save, read, prefix):
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    save({prefix + name: value for name, value in attention.state_dict().items()})
    module = read(num_heads=2)
    assert module.config.spec.add_bias_kv
    assert module.parameters["bias_k"].equal(attention.bias_k.detach().flatten())
    assert module.parameters["bias_v"].equal(attention.bias_v.detach().flatten())


def test_a_learned_key_of_another_width_is_refused(save, read):
    state = nn.MultiheadAttention(8, 2, add_bias_kv=True).state_dict()
    save(state | {"bias_v": torch.zeros(1, 1, 6)})
    with pytest.raises(InvalidCheckpoint, match="bias_v has shape"):
        read(num_heads=2)
    save({name: value for name, value in state.items() if name != "bias_v"})
    with pytest.raises(InvalidCheckpoint, match="bias_v"):
        read(num_heads=2)


def test_heads_come_from_the_request_or_the_config_and_must_agree(save, read):
    save(nn.MultiheadAttention(12, 3), folder="bare")
    with pytest.raises(InvalidRequest, match="send num_heads") as caught:
        read("bare")
    assert caught.value.param == "num_heads"
    with pytest.raises(InvalidRequest, match="5 heads do not divide") as caught:
        read("bare", num_heads=5)
    assert caught.value.param == "num_heads"
    with pytest.raises(InvalidRequest):
        read("bare", num_heads=24)
    for entry in ("num_heads", "num_attention_heads", "nhead"):
        save(nn.MultiheadAttention(12, 3), {entry: 3}, folder=entry)
        assert read(entry).config.num_heads == 3
    with pytest.raises(InvalidRequest, match=r"num_heads is 4, but config\.json says 3") as caught:
        read("nhead", num_heads=4)
    assert caught.value.facts == {"expected": 3, "actual": 4}
    save(nn.MultiheadAttention(12, 3), {"nhead": 0}, folder="zero")
    with pytest.raises(InvalidRequest, match="send num_heads"):
        read("zero")


# ── BERT ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
}


def bert_parameters(attention):
    modules = {"q": attention.self.query, "k": attention.self.key, "v": attention.self.value}
    modules["o"] = attention.output.dense
    return {
        f"{name}_proj.{kind}": getattr(linear, kind) for name, linear in modules.items() for kind in ("weight", "bias")
    }


def watched(model, linear, **inputs):
    """Record the input of an attention's query projection and the output of its output projection."""
    seen = {}
    hooks = [
        linear.self.query.register_forward_hook(lambda _, args, __: seen.update(query=args[0])),
        linear.self.key.register_forward_hook(lambda _, args, __: seen.update(key=args[0])),
        linear.output.dense.register_forward_hook(lambda _, __, output: seen.update(output=output)),
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def save_pretrained(model, place, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in model.parameters():
            nn.init.normal_(value, std=0.3)  # biases too
        model.save_pretrained(place, **options)


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(BertModel, BertConfig), (RobertaModel, RobertaConfig), (ElectraModel, ElectraConfig)],
)
def test_an_encoder_of_the_bert_family_gives_its_output(model_class, config_class, read, root):
    model = model_class(config_class(**TINY))
    save_pretrained(model, root / "net")
    attention = model.encoder.layer[1].attention
    module = read(layer=1)
    assert module.name == "net.1"
    assert same(module, bert_parameters(attention))
    assert (module.config.num_heads, module.config.spec, module.source.family) == (4, AttentionSpec(), "bert")
    seen = watched(model, attention, input_ids=torch.arange(10).reshape(2, 5))
    torch.testing.assert_close(attend(module, seen["query"]), seen["output"], atol=1e-6, rtol=0)


def test_a_decoder_of_bert_is_causal_and_has_cross_attention(read, root):
    model = BertModel(BertConfig(**TINY, is_decoder=True, add_cross_attention=True, use_cache=False))
    save_pretrained(model, root / "net")
    layer = model.encoder.layer[0]
    own, cross = read(), read(part="cross", name="cross")
    assert own.config.spec == AttentionSpec(masks=[Causal()])
    assert cross.config.spec == AttentionSpec()
    assert same(cross, bert_parameters(layer.crossattention))
    inputs = {"input_ids": torch.arange(10).reshape(2, 5), "encoder_hidden_states": torch.randn(2, 3, 32)}
    seen = watched(model, layer.attention, **inputs)
    torch.testing.assert_close(attend(own, seen["query"], is_causal=True), seen["output"], atol=1e-6, rtol=0)
    seen = watched(model, layer.crossattention, **inputs)
    torch.testing.assert_close(attend(cross, seen["query"], seen["key"]), seen["output"], atol=1e-6, rtol=0)


def bert_state(prefix="", layers=1, width=8, dtype=torch.float32):
    return {
        f"{prefix}encoder.layer.{layer}.attention.{module}.{kind}": torch.randn(
            (width, width) if kind == "weight" else (width,)
        ).to(dtype)
        for layer in range(layers)
        for module in ("self.query", "self.key", "self.value", "output.dense")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("prefix", "dtype"), [("", torch.float16), ("bert.", torch.bfloat16), ("model.text.", torch.float32)]
)
def test_any_prefix_and_the_dtype_of_the_checkpoint(save, read, prefix, dtype):
    state = bert_state(prefix, dtype=dtype)
    save(state | {"unrelated": torch.zeros(3, dtype=torch.int8)}, {"num_attention_heads": 2})
    module = read()
    assert module.config.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(
        module.parameters["q_proj.weight"], state[f"{prefix}encoder.layer.0.attention.self.query.weight"]
    )


def test_each_stack_of_a_pair_of_models_uses_its_own_config(save, read):
    config = {
        "model_type": "encoder-decoder",
        "encoder": {"model_type": "bert", "num_attention_heads": 2},
        "decoder": {"model_type": "bert", "num_attention_heads": 4, "is_decoder": True},
    }
    save(bert_state("encoder.") | bert_state("decoder.bert."), config)
    with pytest.raises(InvalidRequest, match="choose one with stack"):
        read()
    assert read(stack="encoder").config.num_heads == 2
    decoder = read(stack="decoder", name="decoder")
    assert (decoder.config.num_heads, decoder.config.spec.masks) == (4, [Causal()])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key', which is not supported"),
        ({"model_type": "roformer"}, "model_type 'roformer', which is not known"),
    ],
)
def test_an_unsupported_computation_is_refused(save, read, config, words):
    save(bert_state(), {"num_attention_heads": 2} | config)
    with pytest.raises(InvalidCheckpoint, match=words):
        read()


def test_global_projections_are_refused(save, read):
    save(bert_state() | {"encoder.layer.0.attention.self.query_global.weight": torch.zeros(8, 8)})
    with pytest.raises(InvalidCheckpoint, match="projections of its own"):
        read(num_heads=2)


@pytest.mark.parametrize(
    ("layers", "words"),
    [((0, 1, 2), "layers 0 to 2"), ((3,), "in layer 3"), ((0, 4), "layers 0, 4")],
)
def test_the_error_for_a_missing_layer_names_the_existing_ones(save, read, layers, words):
    state = bert_state(layers=5)
    save({name: value for name, value in state.items() if int(name.split(".")[2]) in layers})
    with pytest.raises(InvalidCheckpoint, match=words) as caught:
        read(layer=7, num_heads=2)
    assert (caught.value.param, caught.value.facts["layers"]) == ("layer", list(layers))
    with pytest.raises(InvalidCheckpoint, match="it has only self-attention"):
        read(part="cross", num_heads=2)


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _changed(**changes):
    state = bert_state()
    for tensor, value in changes.items():
        name = f"encoder.layer.0.attention.{tensor.replace('__', '.')}"
        if value is None:
            del state[name]
        else:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (_changed(self__key__weight=None), "lacks encoder.layer.0.attention.self.key.weight"),
        (_changed(self__key__weight=torch.zeros(8, 8, dtype=torch.float16)), "differ in dtype: float16, float32"),
        (_changed(self__key__weight=torch.zeros(8, 8, dtype=torch.int8)), "has dtype I8; expected one of F16"),
        (_changed(self__key__weight=torch.zeros(8)), r"has shape \[8\], which no k_proj.weight has"),
        (_changed(self__query__weight=torch.zeros(0, 8)), r"has shape \[0, 8\]"),
        (_changed(self__key__bias=torch.zeros(7)), "do not fit each other: k_proj.bias"),
        (_changed(output__dense__weight=torch.zeros(8, 4)), "do not fit each other: o_proj.weight"),
        (_changed(self__key__weight=torch.zeros(5, 8)), "2 heads do not divide"),
        ({"something.else": torch.zeros(2)}, "such as something.else, is of an attention layer"),
    ],
)
def test_the_error_for_incomplete_tensors_gives_the_reason(save, read, library, state, words):
    save(state, {"num_attention_heads": 2})
    with pytest.raises(InvalidCheckpoint, match=words):
        read()
    assert library.list() == []


def test_biases_may_be_on_some_projections_only(save, read):
    save(_changed(self__key__bias=None), {"num_attention_heads": 2})
    assert read().config.bias == Biases(q_proj=True, v_proj=True, o_proj=True)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_shards_are_found_through_the_index_and_by_their_names(save, read, root):
    state = bert_state(layers=2)
    names = list(state)
    shards = {"model-1-of-2.safetensors": names[:5], "model-2-of-2.safetensors": names[5:]}
    for folder in ("indexed", "listed"):
        for file, held in shards.items():
            save({name: state[name] for name in held}, {"num_attention_heads": 2}, folder, file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (root / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    a, b = read("indexed", layer=1), read("listed", layer=1)
    assert a.version == b.version
    os.remove(root / "indexed" / "model-2-of-2.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"the file 'model-2-of-2\.safetensors' of the checkpoint is missing"):
        read("indexed", layer=0, name="again")


def test_one_file_is_a_checkpoint_and_gives_the_name(save, read):
    save(bert_state(), {"num_attention_heads": 2}, file="tiny bert.safetensors")
    module = read("net/./tiny bert.safetensors")
    assert module.name == "tiny-bert.0"
    assert module.source.checkpoint == "net/tiny bert.safetensors"


@pytest.mark.parametrize(
    ("label", "layer", "name"),
    [
        ("minilm", 0, "minilm.0"),
        ("all MiniLM/L6 v2", 11, "all-MiniLM-L6-v2.11"),
        ("..", 3, "checkpoint.3"),
        ("_ü", 3, "checkpoint.3"),
        ("x" * 200, 10, "x" * 125 + ".10"),
    ],
)
def test_default_names_are_valid_names(label, layer, name):
    assert default_name(label, layer) == name
    assert ImportModule(checkpoint="x", name=name).name == name


def test_a_repeated_import_changes_nothing(save, read, library, reopen):
    save(bert_state(layers=2), {"num_attention_heads": 2})
    module = read()
    assert library.import_checkpoint(ImportModule(checkpoint="net")) == (module, False)
    with pytest.raises(ModuleExists):
        library.import_checkpoint(ImportModule(checkpoint="net", layer=1, name="net.0"))
    assert reopen().get("net.0").info() == module.info()


def test_a_module_outlives_its_checkpoint(save, read, root):
    save(bert_state(), {"num_attention_heads": 2})
    module = read()
    before = {name: value.clone() for name, value in module.parameters.items()}
    path = root / "net" / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # in place, so that a memory map would see it
    assert same(module, before)


def test_nothing_outside_the_repository_is_read(save, read, root, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    save_file(bert_state(), outside / "model.safetensors")
    save(bert_state(), {"num_attention_heads": 2})
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "linked.safetensors").symlink_to(outside / "model.safetensors")
    (root / "half").mkdir()
    (root / "half" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "index").mkdir()
    (root / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(bert_state(), f"../../{outside.name}/model.safetensors")})
    )
    up = os.path.relpath(outside, root)
    messages = set()
    for checkpoint in [str(outside), up, f"{up}/model.safetensors", f"{up}/nothing", "link", "linked.safetensors",
                       "loop", "net\0", "x" * 4000, "/", "..", "missing", "net/config.json"]:  # fmt: skip
        with pytest.raises(CheckpointNotFound) as caught:
            read(checkpoint, num_heads=2)
        messages.add(caught.value.detail.replace(repr(checkpoint[:128]), ""))
        assert caught.value.param == "checkpoint"
    assert len(messages) == 1
    for checkpoint in ("half", "index"):
        with pytest.raises(InvalidCheckpoint) as caught:
            read(checkpoint, num_heads=2)
        assert str(root) not in caught.value.detail
    (root / "alias").symlink_to(root / "net")
    assert read("alias").name == "net.0"  # a link inside the repository is allowed
    (root / "config-link").mkdir()
    save(bert_state(), folder="config-link")
    (outside / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    (root / "config-link" / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(InvalidRequest, match="send num_heads"):
        read("config-link")


class Planted:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint was unpickled",))


INDEX = b'{"weight_map": {"a": "notes.txt"}}'
EMPTY = (2).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"holds no \.safetensors file"),
        ({"pytorch_model.bin": pickle.dumps(Planted())}, "attention convert FOLDER OUT"),
        ({"model.safetensors": pickle.dumps(Planted())}, r"model\.safetensors is not a readable safetensors file"),
        ({"model.safetensors": b""}, "is not a readable"),
        ({"model.safetensors": (2**40).to_bytes(8, "little") + b"{}"}, "is not a readable"),
        ({"a.safetensors.index.json": b"[]"}, "is not a JSON object"),
        ({"a.safetensors.index.json": b"{}"}, "no weight_map"),
        ({"a.safetensors.index.json": b'{"weight_map": {"a": 1}}'}, "no weight_map"),
        (
            {"a.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
            r"'b\.safetensors' of the ch.* missing",
        ),
        ({"a.safetensors.index.json": INDEX, "notes.txt": b"a secret"}, r"names 'notes\.txt' as a file with tensors"),
        (
            {"a.safetensors.index.json": INDEX.replace(b"txt", b"safetensors"), "notes.safetensors": b"a secret"},
            r"notes\.safetensors is not a readable safetensors file",
        ),
        ({"model.safetensors.index.json": INDEX, "a.safetensors.index.json": b"{}"}, r"names 'notes\.txt'"),
        ({"config.json": b'{"transformers_weights": "notes.txt"}', "model.safetensors": b""}, r"names 'notes\.txt'"),
        ({"model.safetensors": EMPTY}, r"holds no tensor \(model\.safetensors\)"),
        ({"a.safetensors.index.json": b'{"weight_map": {}}'}, "holds no tensor"),
    ],
)
def test_the_error_for_files_without_checkpoint_gives_the_reason(root, read, files, words):
    (root / "net").mkdir()
    for name, content in files.items():
        (root / "net" / name).write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=words) as caught:
        read(num_heads=2)
    assert str(root) not in caught.value.detail


def test_the_tensors_of_a_file_that_the_config_names_are_those_of_transformers(save, read, root):
    save(bert_state(), {"num_attention_heads": 2, "transformers_weights": "other.safetensors"})
    other = bert_state()
    save(other, file="other.safetensors")
    assert read().parameters["o_proj.weight"].equal(other["encoder.layer.0.attention.output.dense.weight"])


def test_two_files_with_the_same_tensor_are_refused(save, read):
    save(bert_state(), {"num_attention_heads": 2}, file="a.safetensors")
    save(bert_state(), file="b.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"a\.safetensors and b\.safetensors both hold"):
        read()
    assert read("net/b.safetensors").name == "b.0"


@pytest.mark.parametrize("content", ["{", "[]", '{"a": ' * 100_000])
def test_an_unreadable_config_is_refused(save, read, root, content):
    save(bert_state())
    (root / "net" / "config.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json of the checkpoint is not a JSON object"):
        read(num_heads=2)


def test_a_checkpoint_that_changes_during_the_import_is_refused(save, library, root, monkeypatch):
    save(bert_state(), {"num_attention_heads": 2})
    check = library._check_free

    def overtaken(*args, **options):
        save(bert_state(width=16))
        check(*args, **options)

    monkeypatch.setattr(library, "_check_free", overtaken)
    with pytest.raises(InvalidCheckpoint, match="changed while it was read"):
        library.import_checkpoint(ImportModule(checkpoint="net"))
    assert library.list() == []


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_no_file_beside_the_tensors_is_refused_and_never_waited_for(tmp_path, make, name):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, folder / "part.safetensors")
    make(folder / name)
    with pytest.raises(InvalidCheckpoint, match=f"{name} of the checkpoint cannot be read: it is no regular file"):
        open_checkpoint(tmp_path, "checkpoint")
    _tiny, listed = catalogue.listed(tmp_path).checkpoints
    assert "no regular file" in listed.problem


@pytest.mark.parametrize("repository", ["modules/theirs", "recordings/of"])
def test_nothing_is_fetched_into_the_folders_of_the_store(root, repository):
    with pytest.raises(InvalidRequest, match="of any owner but modules, recordings, lenses, probes, vectors"):
        hub.fetch(root, repository)
