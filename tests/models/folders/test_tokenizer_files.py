"""The files of tokenizers are those that transformers reads, and without them no text is taken."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tools.models_walk.model_types import READ, built, named, prepare, reads
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from attention_contract.errors import AttentionError, InvalidRequest
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.folders.tokenizer_files import (
    CLASSES,
    TEXT_FILES,
    TokenizerClass,
    _class_of,
    vocabulary_of,
)
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info

BESIDES = {"tokenizer.json", "tokenizer_config.json", "normalizer.json", "entity_vocab.json"}
"""Files of a class that are no vocabulary, and the one that most classes read in its place."""
ALSO = {"BertJapaneseTokenizer": {"spiece.model"}}
"""Files that a class reads only if its config says so."""
PLAIN = {"TokenizersBackend", "PreTrainedTokenizerFast"}
BUILT_IN = {"canine", "dia", "esmc", "esmfold2", "perceiver"}
"""Types whose tokenizer is right without a file."""
PROTEINS = "MKTAYIAKQRQISFVKSHFSRQ", "GSHMLEDPVWDNRYTGCLANDE"
LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
FOREIGN = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{each}" for each in LETTERS)])
"""A vocabulary of letters, as BERT reads it."""
NAMES = sorted(
    {*TOKENIZER_MAPPING_NAMES.values(), *(name for name in dir(transformers) if "Tokenizer" in name)} - {None}
)


def class_of(name):
    """The class of transformers of a name; None for what is no tokenizer of texts, or needs another package."""
    try:
        found = tokenizer_class_from_name(name)
        return found if isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase) else None
    except ImportError:
        return None


@pytest.mark.parametrize("name", CLASSES)
def test_the_files_are_those_of_the_class_of_transformers(name):
    found, stated = class_of(name), CLASSES[name]
    if found is None:
        pytest.skip("it needs another package, or is two tokenizers")
    read = {*found.vocab_files_names.values()} - BESIDES - ALSO.get(name, set())
    assert read <= {*stated.files}
    assert {*stated.files} - read <= {"tokenizer.model"}  # which transformers takes for the vocabulary of any class
    assert stated.whole == (transformers.TokenizersBackend in found.__mro__)


def test_every_class_of_transformers_is_in_the_table():
    lacking = {name for name in NAMES if class_of(name) is not None and name.removesuffix("Fast") not in CLASSES}
    general = {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "PreTrainedTokenizerBase", "BertTokenizerLegacy"}
    assert lacking <= general


@pytest.fixture
def chosen(monkeypatch):
    """Return a function that returns the class that transformers chooses for a folder."""
    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda made, *_, **__: made))
    return lambda folder, config: AutoTokenizer.from_pretrained(folder, config=config, mistral_format=False)


@pytest.mark.sampled(kind=20)
@pytest.mark.parametrize("kind", sorted(CONFIG_MAPPING))
def test_transformers_chooses_the_class_that_is_foretold(chosen, tmp_path, kind):
    """The folder names no class, or one of these."""
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:
        pytest.skip("its config needs entries")
    for name in (None, "BertTokenizerFast", "LlamaTokenizerFast", "ByT5Tokenizer", "OddTokenizer"):
        folder = tmp_path / str(name)
        folder.mkdir()
        if name is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        foretold = _class_of(folder, config.to_dict())
        try:
            made = getattr(chosen(folder, config), "__name__", None)  # that of RAG is an object with two of them
        except (ImportError, ValueError):
            # A class that needs another package: see the test of folders without a tokenizer.
            (folder / "tokenizer.json").write_text("{}")
            assert class_of(foretold) is None or not vocabulary_of(folder, config.to_dict()).is_there, name
            continue
        if kind == "rag" and name is None:
            assert CLASSES[foretold].reads
            continue
        assert CLASSES[foretold] == CLASSES["TokenizersBackend" if made in PLAIN else made], name


def test_a_folder_without_files_reads_no_text_unless_the_vocabulary_is_built_in(tmp_path):
    found = {kind: vocabulary_of(tmp_path, {"model_type": kind}).missing for kind in CONFIG_MAPPING}
    assert {kind for kind, missing in found.items() if missing is None} == BUILT_IN
    assert set(found.values()) == {None, ""}


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_a_vocabulary_that_is_built_in_tells_texts_apart(tmp_path, kind):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, config=CONFIG_MAPPING[kind]())
    first, second = (tokenizer(each)["input_ids"] for each in PROTEINS)
    assert first != second


@pytest.mark.sampled(name=12)
@pytest.mark.parametrize(
    "name", [name for name, each in CLASSES.items() if not each.built_in and name != "RagTokenizer"]
)
def test_a_class_whose_files_are_missing_tells_no_texts_apart(tmp_path, name):
    """Without this, the table would refuse a tokenizer that is right."""
    made = class_of(name)
    if made is None:
        pytest.skip("it needs another package")
    (tmp_path / "config.json").write_text("{}")
    try:
        tokenizer = made.from_pretrained(tmp_path)
        first, second = (tokenizer(each)["input_ids"] for each in PROTEINS)
    except Exception:  # as many do without a vocabulary
        return
    assert first == second


def load(folder):
    return LoadedModel.load(folder.resolve(), dtype=None, device=torch.device("cpu"), progress=lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    prepare()


@pytest.mark.sampled(kind=6)
@pytest.mark.parametrize("files", [{}, {"vocab.txt": FOREIGN}], ids=["alone", "foreign"])
@pytest.mark.parametrize("kind", sorted(named()))
def test_a_model_takes_the_same_before_and_after_it_is_loaded(tmp_path, kind, files):
    if reads(kind) not in READ:
        pytest.skip("it reads other things")
    try:
        model = built(kind)
        model.save_pretrained(tmp_path / "net")
    except Exception:
        pytest.skip("it is not built small")
    for name, content in files.items():
        (tmp_path / "net" / name).write_text(content)
    listed = find_folder(tmp_path, "net")
    told = {each.partition(" (")[0] for each in listed.left_out}
    assert told & {*files} == {*files}.difference(listed.vocabulary.files)
    if listed.refused is not None:
        return
    try:
        loaded = load(tmp_path / "net")
    except AttentionError:  # without a processor, such as an encoder of images
        return
    try:
        assert listed.takes == loaded.reader.takes
        if "text" in listed.takes:
            first, second = (loaded.reader.tokens(each, "text").ids for each in PROTEINS)
            assert first != second
        elif "images" not in listed.takes:
            with pytest.raises(InvalidRequest, match="has no tokenizer"):
                loaded.reader.tokens(PROTEINS[0], "text")
    finally:
        loaded.close()


@pytest.fixture
def bert(tmp_path):
    """The folder of a BERT without a tokenizer."""
    built("bert").save_pretrained(tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_images_that_are_parts_of_a_text_need_its_tokenizer(tmp_path, kind):
    built(kind).save_pretrained(tmp_path / "net")
    transformers.ViTImageProcessorPil().save_pretrained(tmp_path / "net")
    loaded = load(tmp_path / "net")
    assert find_folder(tmp_path, "net").takes == loaded.reader.takes == []
    loaded.close()


def test_a_vocabulary_far_smaller_than_the_models_is_told(bert):
    (bert / "vocab.txt").write_text(FOREIGN)
    loaded = load(bert)
    assert not [each for each in model_info(loaded)["left_out"] if each.startswith("tokenizer")]  # 57 of 96
    (bert / "vocab.txt").write_text("\n".join(FOREIGN.split("\n")[:20]))
    (told,) = (each for each in model_info(load(bert))["left_out"] if each.startswith("tokenizer"))
    assert told == "tokenizer (20 tokens, and the model has embeddings of 96: it may be another model's)"


def test_a_vocabulary_of_special_tokens_alone_is_none(bert):
    (bert / "vocab.txt").write_text("\n".join(FOREIGN.split("\n")[:5]))
    loaded = load(bert)
    assert loaded.reader.takes == []
    assert "tokenizer (vocab.txt has only special tokens)" in model_info(loaded)["left_out"]


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_tokenizer_that_is_added_later_is_noticed(bert, name):
    loaded = load(bert)
    with pytest.raises(InvalidRequest) as caught:
        loaded.reader.tokens("A", "text")
    assert (caught.value.param, caught.value.detail) == ("text", "text: the checkpoint has no tokenizer; send tokens")
    (bert / name).write_text(FOREIGN)
    with pytest.raises(InvalidRequest, match=r"was written after the model was loaded \(unload the model to read it\)"):
        loaded.reader.tokens("A", "text")


def test_a_file_that_transformers_takes_for_any_vocabulary_is_told(tmp_path):
    """Beside ``tokenizer.model.v3``, transformers would make a BERT's tokenizer with an empty vocabulary."""
    (tmp_path / "vocab.txt").write_text(FOREIGN)
    (tmp_path / "tokenizer.model.v3").write_text("x")
    found = vocabulary_of(tmp_path, {"model_type": "bert"})
    assert "transformers takes tokenizer.model.v3" in found.missing
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, config=CONFIG_MAPPING["bert"]())
    assert tokenizer(PROTEINS[0])["input_ids"] == tokenizer(PROTEINS[1])["input_ids"]


def test_the_files_that_are_told_are_those_of_the_table():
    assert {name for each in CLASSES.values() for name in each.files} <= {*TEXT_FILES}
    assert CLASSES["BertTokenizer"] == TokenizerClass(("vocab.txt",))
    assert all(Path(name).name == name for name in TEXT_FILES)
