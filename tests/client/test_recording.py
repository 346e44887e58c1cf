"""Recordings: equal to transformers' own outputs, the same after a round trip, mapped without being read."""

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from attention_client.recording import Recording, record
from attention_contract.errors import InvalidRequest, Unreadable
from tests.client import tiny_models

TEXT, TARGET = "the cat sat on the mat", "die Katze saß"
WEIGHTS, HIDDEN = 2e-6, 1e-6


@pytest.fixture(scope="module")
def bert(tokenizer):
    return record(tiny_models.model("bert"), tokenizer, TEXT)


def eager(family, tokenizer, target=None):
    """The outputs of transformers itself."""
    model = tiny_models.model(family)
    model.set_attn_implementation("eager")
    inputs = dict(tokenizer(TEXT, return_tensors="pt"))
    if model.config.is_encoder_decoder:
        ids = [model.config.decoder_start_token_id, *(tokenizer(target)["input_ids"] if target else [])]
        inputs["decoder_input_ids"] = torch.tensor([ids])
    with torch.no_grad():
        return model(**inputs, output_attentions=True, output_hidden_states=True)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_recording_of_one_stack_is_what_transformers_returns(family, tokenizer):
    model = tiny_models.model(family)
    assert model.config._attn_implementation == "sdpa"
    recording, expected = record(model, tokenizer, TEXT), eager(family, tokenizer)
    assert model.config._attn_implementation == "sdpa"
    assert [each.name for each in recording.attentions] == ["layers.0", "layers.1"]
    assert recording.attentions[1].heads == ["L1H0", "L1H1", "L1H2", "L1H3"]
    assert recording.facts.tokens == {"layers": TEXT.split()}
    norm = getattr(model, {"gpt2": "ln_f", "llama": "norm"}.get(family, ""), None)
    assert len(recording.tensors) == 2 * 2 + 1 + (norm is not None)
    same(recording.read(tensor="layers.embeddings"), expected.hidden_states[0], HIDDEN)
    for layer in range(2):
        same(recording.weights(layer), expected.attentions[layer], WEIGHTS)
    states_are_before_the_norm(recording, "layers", expected.hidden_states, norm)
    facts = recording.facts
    assert (facts.text, facts.target) == (TEXT, None)
    assert {"transformers", "torch", "attention-service"} <= set(facts.versions)
    assert facts.created.tzinfo is not None


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("target", [None, TARGET])
def test_both_stacks_and_what_lies_between_them_are_recorded(family, target, tokenizer):
    model = tiny_models.model(family)
    recording, expected = record(model, tokenizer, TEXT, target=target), eager(family, tokenizer, target)
    start = tiny_models.WORDS[model.config.decoder_start_token_id]
    assert recording.facts.tokens == {"encoder": TEXT.split(), "decoder": [start, *(target or "").split()]}
    decoders = len(expected.decoder_attentions)
    assert [each.name for each in recording.attentions] == [
        "encoder.0", "encoder.1", *(f"decoder.{at}{part}" for at in range(decoders) for part in ("", ".cross"))
    ]  # fmt: skip
    for stack in ("encoder", "decoder"):
        states = expected[f"{stack}_hidden_states"]
        same(recording.read(tensor=f"{stack}.embeddings"), states[0], HIDDEN)
        for layer, weights in enumerate(expected[f"{stack}_attentions"]):
            same(recording.weights(f"{stack}.{layer}"), weights, WEIGHTS)
        norm = getattr(getattr(model, stack), "final_layer_norm", None)
        states_are_before_the_norm(recording, stack, states, norm)
    for layer, weights in enumerate(expected.cross_attentions):
        same(recording.weights(f"decoder.{layer}.cross"), weights, WEIGHTS)
    assert recording.tokens("decoder.0.cross") == (recording.facts.tokens["decoder"], TEXT.split())


def states_are_before_the_norm(recording, stack, states, norm):
    """Those of transformers, whose last states the norm has made of the last layer's."""
    *_, last = states
    for layer, state in enumerate(states[1:-1]):
        same(recording.hidden(f"{stack}.{layer}"), state, HIDDEN)
    before = recording.hidden(f"{stack}.{len(states) - 2}")
    if norm is None:
        same(before, last, HIDDEN)
        assert f"{stack}.final" not in recording.tensors
    else:
        same(norm(torch.tensor(before)).detach().numpy(), last, HIDDEN)
        same(recording.read(tensor=f"{stack}.final"), last, HIDDEN)


def same(array, tensor, tolerance):
    np.testing.assert_allclose(array, tensor[0].numpy(), atol=tolerance, rtol=0)


def test_training_and_dropout_are_put_aside_and_come_back(tokenizer):
    model = tiny_models.model("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5).train()
    first, second = record(model, tokenizer, TEXT), record(model, tokenizer, TEXT)
    assert model.training
    np.testing.assert_array_equal(first.weights(1), second.weights(1))


def test_a_recording_is_the_same_after_a_round_trip(bert, tmp_path):
    bert.save(tmp_path / "cat.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["cat.safetensors"]
    again = Recording.load(tmp_path / "cat.safetensors")
    assert again.facts == bert.facts
    assert set(again.tensors) == set(bert.tensors)
    for name, array in bert.tensors.items():
        assert again.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(again.tensors[name], array)
    again.save(tmp_path / "cat.safetensors")  # over the file that is mapped
    np.testing.assert_array_equal(Recording.load(tmp_path / "cat.safetensors").weights(0), bert.weights(0))


def test_half_precision_survives_the_file(tokenizer, tmp_path):
    recording = record(tiny_models.model("llama").to(torch.bfloat16), tokenizer, TEXT)
    assert recording.weights(0).dtype == ml_dtypes.bfloat16
    again = Recording.load(recording.save(tmp_path / "half.safetensors"))
    assert again.weights(0).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(again.read(0, heads=1), recording.weights(0)[1:2])


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({"heads": 1}, np.s_[1:2]),
        ({"heads": [2, 0], "queries": slice(1, 3)}, np.s_[[2, 0], 1:3]),
        ({"queries": "0:2", "keys": np.array([5, 1])}, np.s_[:, :2, [5, 1]]),
        ({"keys": slice(4, None)}, np.s_[:, :, 4:]),
    ],
)
def test_parts_are_the_same_in_memory_and_from_the_file(bert, tmp_path, chosen, part):
    mapped = Recording.load(bert.save(tmp_path / "cat.safetensors"))
    for recording in (bert, mapped):
        np.testing.assert_array_equal(recording.read(0, **chosen), bert.tensors["layers.0.weights"][part])


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("7",), "tensor"), ((0, "q"), "tensor"), ((0, "weights", 4), "heads"), ((0, "weights", slice(0, 4, 2)), None)],
)
def test_a_part_that_is_not_there_is_refused(bert, arguments, param):
    layer, *rest = arguments
    tensor, heads = (*rest, None, None)[:2]
    with pytest.raises(InvalidRequest) as caught:
        bert.read(layer, tensor, heads=heads)
    assert caught.value.param == param


def test_a_file_that_is_none_is_refused_with_its_reason(bert, tmp_path):
    whole = bert.save(tmp_path / "cat.safetensors").read_bytes()
    for name, content in (("cut", whole[:-3]), ("empty", b""), ("noise", b"\xff" * 64)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Unreadable, match=name):
            Recording.load(tmp_path / name)
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2)}, tmp_path / "other")
    with pytest.raises(Unreadable, match="no metadata entry 'recording'"):
        Recording.load(tmp_path / "other")
    save_file({"layers.0.weights": np.ones((1, 2, 2))}, tmp_path / "wrong", metadata=dict(_metadata(whole, tmp_path)))
    with pytest.raises(Unreadable, match=r"layers\.0\.weights"):
        Recording.load(tmp_path / "wrong")
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none")


def _metadata(content, folder):
    (folder / "copy").write_bytes(content)
    with safe_open(folder / "copy", framework="np") as file:
        return file.metadata()


def test_entropy_and_top_keys_are_those_of_the_weights(bert):
    weights = bert.weights(0).astype(np.float64)
    np.testing.assert_allclose(bert.entropy(0), -(weights * np.log(weights)).sum(-1).mean(-1), rtol=1e-6)
    found = bert.top_keys(0, head=2, query=4, k=2)
    best = np.argsort(-weights[2, 4])[:2]
    assert found == [(TEXT.split()[key], pytest.approx(weights[2, 4, key])) for key in best]


@pytest.mark.parametrize(
    ("taps", "detail"),
    [(("scores",), "give a client"), (("wieghts",), "did you mean 'weights'"), (("output",), "client")],
)
def test_taps_that_cannot_be_recorded_are_refused(taps, detail, tokenizer):
    with pytest.raises(InvalidRequest, match=detail) as caught:
        record(tiny_models.model("bert"), tokenizer, TEXT, taps=taps)
    assert caught.value.param == "taps"


def test_a_text_without_tokens_and_a_target_without_a_decoder_are_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="text"):
        record(tiny_models.model("bert"), tokenizer, "")
    with pytest.raises(InvalidRequest, match="target"):
        record(tiny_models.model("bert"), tokenizer, TEXT, target=TARGET)


def test_a_notebook_shows_every_head_with_its_labels(bert, tokenizer):
    html = bert._repr_html_()
    assert html.count("attention-maps") == 1
    assert all(f'"layers.{layer} L{layer}H{head}"' in html for layer in (0, 1) for head in range(4))
    assert html.count("<td") == 6 * 6  # of the first head, where no script runs
    strange = record(tiny_models.model("bert"), tokenizer, "the <script>alert(1)</script> cat")
    assert "<script>alert" not in strange._repr_html_()
    assert "bert" in repr(bert).lower()


def test_a_figure_shows_one_map_a_head(bert, tmp_path):
    pytest.importorskip("matplotlib")
    assert [axes.get_title() for axes in bert.figure(1).axes][:4] == bert.attentions[1].heads
    one = bert.figure("layers.0", head=2)
    assert one.axes[0].get_title() == "L0H2"
    assert [label.get_text() for label in one.axes[0].get_yticklabels()] == TEXT.split()
    one.savefig(tmp_path / "head.svg")
    assert "<svg" in (tmp_path / "head.svg").read_text()


def close(array, expected, tolerance):
    np.testing.assert_allclose(array, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_q_k_and_v_recorded_here_give_the_context_and_the_same_weights(family, tokenizer):
    model = tiny_models.model(family)
    plain = record(model, tokenizer, TEXT)
    taken = record(model, tokenizer, TEXT, taps=["weights", "q", "k", "v", "context"])
    for name, value in plain.tensors.items():
        close(taken.tensors[name], value, WEIGHTS)
    assert model.config._attn_implementation == "sdpa"
    for each in taken.attentions:
        k, v = taken.read(each.name, "k"), taken.read(each.name, "v")
        repeats = len(each.heads) // len(v)
        close(taken.read(each.name, "context"), taken.weights(each.name) @ v.repeat(repeats, 0), WEIGHTS)
        if family != "t5":  # which adds a position bias, and does not scale
            scores = taken.read(each.name, "q") @ k.repeat(repeats, 0).swapaxes(-1, -2) / np.sqrt(k.shape[-1])
            if family == "llama":
                scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            close(taken.weights(each.name), shares / shares.sum(-1, keepdims=True), WEIGHTS)


def headed(kind, family):
    torch.manual_seed(0)
    config = tiny_models.CONFIGS[family]()
    config.initializer_range = 0.5
    return kind(config).eval()
