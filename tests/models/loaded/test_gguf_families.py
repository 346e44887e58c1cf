"""Every architecture of GGUF computes what its class does with llama.cpp's sizes, or is refused before a load."""

import numpy as np
import pytest
import torch

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints.forms.gguf import families

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from tests.models.gguf_families import FAMILIES, write_family
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

IDS = torch.tensor([[5, 3, 7, 8, 6, 4, 9, 10, 11, 12, 21, 17]])
TARGET = torch.tensor([[3, 5, 9, 7]])
LONG = {"gemma2-27b", "gemma3-27b"}


def loaded(file):
    return LoadedModel.load(file, dtype="float32", device=torch.device("cpu"), progress=lambda _: None)


def logits(model):
    pairs = {"decoder_input_ids": TARGET} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **pairs).logits


@pytest.mark.sampled(case=8)
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_computes_what_its_class_does(tmp_path, case):
    family = FAMILIES[case]
    expected = family.model()
    write_family(tmp_path / "net.gguf", family, expected, entries={"odd": 3})
    folder = find_folder(tmp_path, "net.gguf")
    assert folder.refused is None
    assert folder.config["model_type"] == expected.config.model_type
    assert folder.config["architectures"] == [type(expected).__name__]
    model = loaded(tmp_path / "net.gguf")
    assert type(model.model) is type(expected)
    np.testing.assert_allclose(logits(model.model), logits(expected), atol=2e-5, rtol=1e-5)
    assert model.left_out == [f"{family.architecture}.odd"]
    assert model.reader.takes == folder.takes


def test_each_architecture_that_is_read_has_a_case():
    refused = {"t5encoder", "deci"}
    assert {family.architecture for family in FAMILIES.values()} == {*families.FAMILIES} - refused


OWN_NAMES = {
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2",
    "mistral": "llama", "umt5": "t5",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}))
def test_each_architecture_that_transformers_reads_is_answered_or_refused_with_the_reason(tmp_path, kind):
    family = FAMILIES["llama"]
    write_family(tmp_path / "net.gguf", family, family.model())
    content = (tmp_path / "net.gguf").read_bytes()
    own = OWN_NAMES.get(kind, kind)
    if own in families.FAMILIES and own != "deci":
        assert any(each.architecture == own for each in FAMILIES.values())
    written = b"\x05\0\0\0\0\0\0\0llama"
    named = content.replace(written, len(kind).to_bytes(8, "little") + kind.encode())
    (tmp_path / "net.gguf").write_bytes(named + bytes(64))  # a longer name may move where they begin
    if kind != "llama":  # a file that only says so has none of its entries
        assert find_folder(tmp_path, "net.gguf").refused
        with pytest.raises(InvalidCheckpoint, match="is no model of this server"):
            loaded(tmp_path / "net.gguf")


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "starcoder2", "stablelm", "phi3"])
def test_what_a_file_leaves_to_its_reader_is_llama_cpps(tmp_path, case):
    left = {
        "rope.freq_base": {"rope_theta": 10000.0}, "attention.head_count_kv": {"num_key_value_heads": 4},
        "attention.key_length": {"head_dim": 8}, "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
        "final_logit_softcapping": {"final_logit_softcapping": 30.0},
    }  # fmt: skip
    if case == "gemma2":
        left["attention.sliding_window"] = {"sliding_window": 4096}
    family = FAMILIES[case]
    expected = family.model()
    gone = tuple(name for name in left if name in family.entries)
    also = ("attention.value_length", "rope.dimension_count", "rope.freq_base_swa")
    write_family(tmp_path / "net.gguf", family, expected, without=(*gone, *also))
    config = find_folder(tmp_path, "net.gguf").config
    rotations = config["rope_parameters"]
    config |= rotations.get("full_attention", rotations)
    for name in gone:
        for field, value in left[name].items():
            assert (case == "phi3" and field == "head_dim") or config[field] == value
    if case == "gemma3":
        assert rotations["sliding_attention"]["rope_theta"] == 10000.0
    if case.startswith("gemma"):
        assert config["query_pre_attn_scalar"] == 8


@pytest.mark.sampled(case=2)
@pytest.mark.parametrize(("case", "scalar"), [("gemma2-27b", 8), ("gemma3-27b", 8), ("gemma2", 16), ("gemma3", 16)])
def test_scores_of_gemma_are_scaled_by_the_size_of_the_model(tmp_path, case, scalar):
    """The weights of the first layer, from the file's numbers alone, in float64."""
    family = FAMILIES[case]
    expected = family.model()
    write_family(tmp_path / "net.gguf", family, expected)
    request = ModelForwardRequest(tokens=IDS[0].tolist(), layers=[0], return_=["weights"])
    found = forward_reply(loaded(tmp_path / "net.gguf"), request).layers[0].weights
    stored = {name: values.double() for name, values in expected.state_dict().items()}
    states = stored["model.embed_tokens.weight"][IDS[0]] * 32**0.5

    def normed(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 + stored[f"model.layers.0.{name}.weight"])

    def turned(x):
        base = 100.0 if case == "gemma3" else 10000.0
        angles = torch.arange(len(x)).double()[:, None] * base ** -(torch.arange(0, 16, 2).double() / 16)
        one, two = x[..., :8], x[..., 8:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    states = normed(states, "input_layernorm")
    query, key = (
        (states @ stored[f"model.layers.0.self_attn.{name}_proj.weight"].T).reshape(12, -1, 16) for name in ("q", "k")
    )
    if case.startswith("gemma3"):
        query, key = normed(query, "self_attn.q_norm"), normed(key, "self_attn.k_norm")
    query, key = turned(query), turned(key).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / scalar**0.5
    if case.startswith("gemma2"):
        cap = family.entries.get("attn_logit_softcapping", 50.0)
        scores = cap * torch.tanh(scores / cap)
    places = torch.arange(12)
    sees = (places[:, None] >= places) & (places[:, None] - places < 3)
    np.testing.assert_allclose(found, scores.masked_fill(~sees, -torch.inf).softmax(-1), atol=1e-5)


REFUSED = {
    "heads by layer": ("llama", {"attention.head_count": [4, 4, 2]}, "differs from layer to layer"),
    "widths by layer": ("qwen2", {"feed_forward_length": [48, 48, 32]}, "differs from layer to layer"),
    "widths of values": ("qwen3", {"attention.value_length": 8}, "value_length is 8, and its key_length 16"),
    "rotated part": ("llama", {"rope.dimension_count": 4}, "rope.dimension_count is 4, and its heads have 8"),
    "no decoder": ("llama", {"attention.causal": False}, "attention.causal is False"),
    "experts of phi": ("phi3", {"expert_count": 4}, "has experts, which Phi3"),
    "experts of gemma 4": ("gemma4", {"expert_count": 4}, "a Gemma 4 with experts"),
    "gates": ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    "scale of experts": ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
    "window of lfm2": ("lfm2", {"attention.sliding_window": 4}, "Lfm2ForCausalLM of transformers has no window"),
    "scaling of qwen 3.5": ("qwen35", {"rope.scaling.type": "yarn"}, "scales rotations"),
    "layers of qwen 3.5": (
        "qwen35", {"attention.recurrent_layers": [True, False, True, False]}, "recurrent_layers are others",
    ),
    "further tokens": ("qwen3moe", {"nextn_predict_layers": 1}, "layers that predict further tokens"),
    "bases of gemma 2": ("gemma2", {"rope.freq_base_swa": 5.0}, "has one base"),
    "a text": ("llama", {"attention.head_count": "four"}, "attention.head_count is no number"),
    "no layers": ("llama", {"block_count": 0}, "block_count is 0; expected a whole number of at least 1"),
    "an older layout": ("falcon-40b", {"tensor_data_layout": "reference"}, "tensor_data_layout"),
    "widths of bloom": ("bloom", {"feed_forward_length": 48}, "BLOOM has 4 times its width"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_class_computes_is_refused_before_a_load(tmp_path, why):
    case, entries, message = REFUSED[why]
    write_family(tmp_path / "net.gguf", FAMILIES[case], FAMILIES[case].model(), entries=entries)
    assert message in find_folder(tmp_path, "net.gguf").refused


@pytest.mark.parametrize("architecture", ["t5encoder", "deci"])
def test_a_family_without_a_class_is_refused_with_the_reason(tmp_path, architecture):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "net.gguf", architecture)
    writer.add_block_count(2)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "transformers has" in find_folder(tmp_path, "net.gguf").refused


def test_biases_that_a_llama_has_in_part_are_zero_for_the_rest(tmp_path):
    family = FAMILIES["llama-biases"]
    expected = family.model()
    write_family(tmp_path / "net.gguf", family, expected, drop=r"(attn_output|ffn_\w+)\.bias")
    for name, values in expected.named_parameters():
        if name.endswith("bias") and ("o_proj" in name or "mlp" in name):
            values.data.zero_()
    model = loaded(tmp_path / "net.gguf")
    np.testing.assert_allclose(logits(model.model), logits(expected), atol=2e-5)
    assert model.left_out == []


def test_tensors_that_no_parameter_takes_are_named(tmp_path):
    family = FAMILIES["qwen2"]
    shorter = family.model(num_hidden_layers=2)
    write_family(tmp_path / "net.gguf", family, family.model(), entries={"block_count": 2})
    model = loaded(tmp_path / "net.gguf")
    assert {name.partition(".attn")[0].partition(".ffn")[0] for name in model.left_out} == {"blk.2"}
    assert len(model.left_out) == 12
    assert model.model.config.num_hidden_layers == shorter.config.num_hidden_layers


@pytest.mark.parametrize("case", ["gpt-oss", "t5-gated", "phi3", "gemma4"])
def test_texts_are_read_by_the_tokenizer_of_the_file(tmp_path, case):
    family = FAMILIES[case]
    write_family(tmp_path / "net.gguf", family, family.model())
    model = loaded(tmp_path / "net.gguf")
    assert model.reader.tokenizer("a")["input_ids"]
    assert "text" in find_folder(tmp_path, "net.gguf").takes
