"""Models from GGUF files compute what the same numbers compute in transformers' own class."""

import numpy as np
import pytest
import torch

from attention_client import Client
from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders.model_catalogue import PROCESS_BYTES, find_folder, listed
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.modules.checkpoints import catalogue
from attention_service.modules.checkpoints.import_plan import plan

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tests.models.gguf_files import BLOCK_BYTES, IDS, llama, write

LEGACY = ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def loaded(file):
    return LoadedModel.load(file, dtype="float32", device=torch.device("cpu"), progress=lambda _: None)


def logits(model):
    with torch.no_grad():
        return model.run({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, AttentionPass({})).logits


def same(tmp_path, expected, **options):
    write(tmp_path / "net.gguf", expected, **options)
    found = loaded(tmp_path / "net.gguf")
    np.testing.assert_allclose(logits(found), expected(IDS).logits.detach(), atol=2e-6)
    for name, tensor in expected.state_dict().items():
        np.testing.assert_allclose(found.model.get_parameter(name).detach(), tensor, atol=1e-6)
    return found


@pytest.mark.sampled(form=4)
@pytest.mark.parametrize("form", [*LEGACY, *BLOCK_BYTES])
def test_every_form_is_what_the_package_dequantizes(tmp_path, form):
    found = same(tmp_path, llama(), form=form)
    plain = form == "F16"
    assert found.weights == ("float32" if plain else f"dequantized from {form}")
    assert found.left_out == []
    folder = find_folder(tmp_path, "net.gguf")
    info = folder.info("net", None)
    assert (info.stored, info.refused, info.architecture) == ("float16" if plain else form, None, "LlamaForCausalLM")
    assert info.bytes == PROCESS_BYTES + sum(each.nbytes for each in {*found.model.parameters()})


SCALED = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "old-linear": ({"rope_type": "linear", "factor": 2.0}, {"rope.scale_linear": 2.0}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    "base": ({"rope_type": "default", "rope_theta": 500.0}, {}),
}


@pytest.mark.sampled(case=2)
@pytest.mark.parametrize("case", SCALED)
def test_rotations_are_scaled_as_the_file_says(tmp_path, case):
    rope, entries = SCALED[case]
    same(tmp_path, llama(rope_parameters={"rope_theta": 10000.0} | rope), entries=entries)


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = llama(rope_parameters=rope)
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7
    same(tmp_path, model, tensors={"rope_freqs.weight": factors})


def test_a_window_makes_it_the_type_that_has_one(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    plain = llama()
    write(tmp_path / "net.gguf", plain, entries={"attention.sliding_window": 3})
    entries = {name: value for name, value in plain.config.to_dict().items() if name != "model_type"}
    expected = MistralForCausalLM(MistralConfig(**entries | {"sliding_window": 3})).eval()
    expected.load_state_dict(plain.state_dict())
    found = loaded(tmp_path / "net.gguf")
    np.testing.assert_allclose(logits(found), expected(IDS).logits.detach(), atol=2e-6)
    assert (logits(found) - plain(IDS).logits).abs().max() > 1e-3
    assert find_folder(tmp_path, "net.gguf").config["model_type"] == "mistral"


def test_a_text_is_read_by_the_tokenizer_of_the_file(tmp_path):
    found = same(tmp_path, llama(), tokens=True)
    assert found.reader.takes == ["text"]
    assert found.reader.tokenizer("a c")["input_ids"] == [1, 8, 10]


@pytest.mark.sampled(tokens=1)
@pytest.mark.parametrize("tokens", [True, False])
def test_no_file_beside_it_is_read_and_each_is_named(tmp_path, tokens):
    (tmp_path / "net").mkdir()
    write(tmp_path / "net" / "net.gguf", llama(), entries={"pooling_type": 1}, tokens=tokens)
    alone = loaded(tmp_path / "net" / "net.gguf").reader
    tokenizer().save_pretrained(tmp_path / "net")
    (tmp_path / "net" / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 0.5}')
    with live_server(tmp_path) as url, Client(url) as client:
        client.models.load("net")
        info = client.models.get("net")
        assert {each.partition(" (")[0] for each in info.left_out} == {
            "config.json", "tokenizer.json", "tokenizer_config.json", "llama.pooling_type",
        }  # fmt: skip
        assert info.takes == alone.takes
        if tokens:
            expected = alone.tokenizer("the cat")["input_ids"]
            assert client.models.tokenize("net", "the cat").tokens == expected != tokenizer()("the cat")["input_ids"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"logit_scale": 4.0}, "its entry llama.logit_scale is 4.0, which transformers does not read"),
        ({"rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier"),
    ],
)
def test_an_entry_that_changes_the_numbers_is_refused(tmp_path, entries, message):
    write(tmp_path / "net.gguf", llama(), entries=entries)
    assert message in find_folder(tmp_path, "net.gguf").refused


def test_a_kind_of_scaling_that_is_unknown_is_refused(tmp_path):
    write(tmp_path / "net.gguf", llama(), entries={"rope.scaling.type": "odd", "rope.scaling.factor": 2.0})
    with pytest.raises(InvalidCheckpoint, match=r"rope\.scaling\.type is 'odd'"):
        loaded(tmp_path / "net.gguf")


def test_what_the_model_does_not_take_is_named(tmp_path):
    write(tmp_path / "net.gguf", llama(), entries={"pooling_type": 1}, tensors={"own.weight": np.ones(3, np.float32)})
    assert loaded(tmp_path / "net.gguf").left_out == ["llama.pooling_type", "own.weight"]


def test_gradients_of_dequantized_weights_are_those_of_the_same_numbers(tmp_path):
    expected = llama()
    write(tmp_path / "net.gguf", expected, form="Q4_0")
    model = loaded(tmp_path / "net.gguf").model
    found = [torch.randn(12, 256, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2)]
    for each, x in zip((model.model.layers[0].mlp, expected.model.layers[0].mlp), found, strict=True):
        each(x).square().sum().backward()
    np.testing.assert_allclose(found[0].grad, found[1].grad, rtol=1e-5, atol=1e-6)


def test_the_list_names_each_file_of_several(tmp_path):
    for folder, names in {"one": ["a"], "two": ["a", "b"]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            write(tmp_path / folder / f"{name}.gguf", llama(), form="Q8_0", tokens=True)
    rows = {row.id: row for row in listed(tmp_path)}
    assert {*rows} == {"tiny", "one", "two--a.gguf", "two--b.gguf"}
    assert (rows["one"].stored, rows["one"].takes, rows["one"].generates) == ("Q8_0", ["text"], True)
    with pytest.raises(InvalidCheckpoint, match=r"two holds 2 GGUF files; name one, such as two/a\.gguf"):
        find_folder(tmp_path, "two")
    assert rows["one"].bytes > 4 * sum(each.numel() for each in llama().parameters())


def test_a_part_of_a_divided_file_and_another_architecture_are_refused(tmp_path):
    write(tmp_path / "net-00001-of-00002.gguf", llama())
    (tmp_path / "net-00002-of-00002.gguf").write_bytes(b"GGUF")
    rows = {row.checkpoint: row.refused for row in listed(tmp_path)}
    assert {*rows} == {"tiny", "net-00001-of-00002.gguf"}
    assert "join the parts" in rows["net-00001-of-00002.gguf"]
    (tmp_path / "net-00001-of-00002.gguf").rename(tmp_path / "net.gguf")
    content = (tmp_path / "net.gguf").read_bytes()
    (tmp_path / "net.gguf").write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lllma"))
    assert "no GGUF file of architecture 'lllma'" in find_folder(tmp_path, "net.gguf").refused


@pytest.mark.parametrize("end", [3, 10, 30, 200, 700])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path, end):
    write(tmp_path / "net.gguf", llama())
    (tmp_path / "net.gguf").write_bytes((tmp_path / "net.gguf").read_bytes()[:end])
    with pytest.raises(InvalidCheckpoint, match="not a readable GGUF file"):
        find_folder(tmp_path, "net.gguf")


def test_the_list_names_the_entries_that_nobody_reads(tmp_path):
    write(tmp_path / "net.gguf", llama(), entries={"odd": 3})
    (row,) = (each for each in listed(tmp_path) if each.checkpoint == "net.gguf")
    assert "llama.odd" in row.left_out


def test_a_layer_is_not_imported_from_it(tmp_path):
    write(tmp_path / "net.gguf", llama())
    (row,) = (each for each in catalogue.listed(tmp_path).checkpoints if each.path == "net.gguf")
    assert row.bytes == (tmp_path / "net.gguf").stat().st_size
    assert "cannot be imported as modules" in (row.problem or "")
    with pytest.raises(InvalidCheckpoint, match="cannot be imported as modules; ask the whole model"):
        plan(tmp_path, ImportModule(checkpoint="net.gguf", layer=0))


def test_without_the_package_the_refusal_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path / "net.gguf", llama())
    monkeypatch.setattr("attention_service.modules.checkpoints.forms.gguf.gguf_form.find_spec", lambda name: None)
    assert "attention-service[gguf]" in find_folder(tmp_path, "net.gguf").refused
