"""Checkpoints as training programs leave them become folders whose models have the same numbers."""

import json
import os

import pytest
import torch
from tests.client.cli.command_line import invoke
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from attention_client.conversion.conversion import convert
from attention_client.conversion.stored_tensors import ConversionError

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20}
CONFIG = BertConfig(**SIZES).to_diff_dict()
IDS = torch.tensor([[2, 5, 7, 9, 3]])
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "."]
RESIDUES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIK", "[HUMAN]"]
ATOMS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "[C@H]", "[OH]", "O", "(", ")", ">>", "1"]


def made(kind, config, **options):
    torch.manual_seed(3)
    model = kind(config(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def written(folder, config, tensors, name="pytorch_model.bin"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    torch.save(tensors, folder / name)
    return folder


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_classifier_of_ones_own_becomes_one_of_transformers(tmp_path):
    """With the prefixes of a training program, names of old norms, and a head that only its shape tells."""
    model = made(BertForSequenceClassification, BertConfig, num_labels=3, **SIZES)
    tensors = {}
    for name, tensor in model.state_dict().items():
        own = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors["module.encoder_of_mine." + own.replace("classifier.", "mood_head.")] = tensor
    tensors["module.temperature"] = torch.ones(1)
    config = CONFIG | {"architectures": ["MoodNet"], "auto_map": {"AutoModel": "x"}}
    source = written(tmp_path / "own", config, {"epoch": 3, "model_state_dict": tensors}, "best.pt")
    (source / "vocab.txt").write_text("\n".join(PIECES) + "\n", "utf-8")
    lines = [*convert(source, tmp_path / "out")]
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(opened.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(logits(opened), logits(model))  # parameters are elsewhere in memory, and sums round so
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("the cats")["input_ids"] == [2, 5, 6, 7, 3]
    said = "\n".join(lines)
    for part in (
        "left out: epoch", "assumed: BertForSequenceClassification, in place of MoodNet",
        "renamed: module.encoder_of_mine.", "mood_head.weight is classifier.weight, by its shape [3, 16]",
        "assumed: 3 classes", "left out: auto_map", "left out: module.temperature", "WordPiece", "lower case",
    ):  # fmt: skip
        assert part in said, said
    assert lines[-1] == f"wrote: {tmp_path / 'out'}"


def test_files_with_an_index_and_without_a_type_are_put_together(tmp_path):
    model = made(GPT2LMHeadModel, GPT2Config, n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=12)
    config = model.config.to_diff_dict() | {
        "model_type": "language_of_mine",
        "eos_token_id": 50256,
        "bos_token_id": None,
    }
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    parts = {"a.bin": names[:7], "b.bin": names[7:]}
    source = written(tmp_path / "parts", config, {name: model.state_dict()[name] for name in parts["a.bin"]}, "a.bin")
    torch.save({name: model.state_dict()[name] for name in parts["b.bin"]}, source / "b.bin")
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index), "utf-8")
    lines = [*convert(source, tmp_path / "out")]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert again.config.eos_token_id is None
    assert any("type gpt2, its tensor" in line for line in lines), lines
    assert any("eos_token_id 50256" in line for line in lines)
    assert any("no file of one" in line for line in lines)


@pytest.mark.parametrize("own", [False, True])
def test_output_embeddings_are_shared_as_they_were(tmp_path, own):
    model = made(BertForMaskedLM, BertConfig, tie_word_embeddings=not own, **SIZES)
    source = written(tmp_path / "in", BertConfig(**SIZES).to_diff_dict(), model.state_dict())
    lines = [*convert(source, tmp_path / "out")]
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert any("output embeddings of their own" in line for line in lines) == own


@pytest.mark.parametrize(
    ("tokens", "text", "pieces"),
    [
        (RESIDUES, "ACD EF[HUMAN]", ["[CLS]", *"ACDEF", "[HUMAN]", "[SEP]"]),
        (ATOMS, "[C@H]Cl(C)>>[OH]", ["[CLS]", "[C@H]", "Cl", "(", "C", ")", ">>", "[OH]", "[SEP]"]),
        (ATOMS, "C[Pd]1", ["[CLS]", "C", "[UNK]", "1", "[SEP]"]),
    ],
)
def test_a_list_of_tokens_becomes_a_tokenizer(tmp_path, tokens, text, pieces):
    model = made(BertForMaskedLM, BertConfig, **SIZES)
    source = written(tmp_path / "in", model.config.to_diff_dict(), model.state_dict())
    (tmp_path / "vocab.txt").write_text("\n".join(tokens), "utf-8")  # in the folder above
    lines = [*convert(source, tmp_path / "out")]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    found = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(found) == pieces
    assert found == [tokens.index(piece) for piece in pieces]
    assert tokenizer.mask_token == "[MASK]"
    assert any("in the folder above" in line for line in lines)


class Code:
    """Pickled, this would write a file when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_code_in_a_pickle_is_not_run(tmp_path):
    source = written(tmp_path / "in", CONFIG, {"weight": Code(tmp_path / "run")})
    with pytest.raises(ConversionError, match="more than tensors"):
        [*convert(source, tmp_path / "out")]
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


FAULTS = {
    "no tensors": (CONFIG, None, {}, "expected a file of tensors"),
    "an object": (CONFIG, [1], {}, "no named tensors"),
    "other sizes": (CONFIG | {"hidden_size": 32}, "good", {}, "lacks bert.embeddings.word_embeddings.weight"),
    "heads that do not divide": (CONFIG | {"num_attention_heads": 3}, "good", {}, "makes no BertForMaskedLM"),
    "another type": ({"model_type": "mine"}, {"weight": torch.ones(2)}, {}, "'mine'"),
    "a type that is none": (CONFIG, "good", {"model_type": "berd"}, "'berd'"),
    "tokens twice": (CONFIG, "good", {"vocab.txt": "a\nb\na"}, "'a' comes twice"),
    "many tokens": (CONFIG, "good", {"vocab.txt": "\n".join(map(str, range(21)))}, "21 tokens"),
    "no text": (CONFIG, "good", {"vocab.txt": b"\xff\xfe"}, "UTF-8"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_converted_is_named_and_nothing_is_left(tmp_path, case):
    config, tensors, more, reason = FAULTS[case]
    given = made(BertForMaskedLM, BertConfig, **SIZES).state_dict() if tensors == "good" else tensors
    source = written(tmp_path / "in", config, given)
    if tensors is None:
        (source / "pytorch_model.bin").unlink()
    if (text := more.get("vocab.txt")) is not None:
        (source / "vocab.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConversionError, match=reason):
        [*convert(source, tmp_path / "out", more.get("model_type"))]
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_the_command_prints_the_steps_and_overwrites_nothing(tmp_path):
    model = made(BertForMaskedLM, BertConfig, **SIZES)
    source = written(tmp_path / "in", model.config.to_diff_dict() | {"model_type": "mine"}, model.state_dict())
    arguments = ["convert", str(source), str(tmp_path / "out"), "--as", "bert"]
    done = invoke(arguments)
    assert done.exit_code == 0, done.output
    assert "assumed: a model of the type bert, as it is asked for" in done.output
    again = invoke(arguments)
    assert again.exit_code == 1
    assert "exists; name a new folder" in again.output
