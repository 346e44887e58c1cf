"""Layers, taps, edits, gradients and errors of attached models."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
    pipeline,
)

from attention_client import AsyncClient, Client
from attention_client.errors import ConnectionFailed
from attention_client.transformers import UnsupportedModel, attach, register
from attention_client.transformers.interface import attend, connect
from attention_contract.errors import InvalidRequest
from tests.client.transformers.families import ENCODERS, prompt, tiny

KNOCK_OUT = {"tap": "weights", "heads": [1], "set": 0}


def close(found: object, expected: object) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


def layers_of(model, client):
    with attach(model, client) as attached:
        return attached.layers


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "implementation"),
    [*product(["llama", "bert", "t5"], ["eager", "sdpa"]), ("gpt_oss", "eager")],  # transformers' SDPA has no sinks
)
def test_other_layers_keep_the_former_implementation(family, implementation, client):
    model, inputs = tiny(family, implementation), prompt()
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, 4:]
    real = slice(None) if family == "t5" else inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)[0][real]
        count = 0
        for layer in layers_of(model, client):
            with attach(model, client, layers=[layer], record=["weights"]) as attached:
                close(model(**inputs)[0][real], expected)
            assert list(attached.recorded) == [layer]
            count += 1
    assert count == {"t5": 6}.get(family, 2)


def test_layers_are_numbers_or_stacks_with_numbers(client):
    clip = CLIPModel(
        CLIPConfig(
            text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        )
    )
    assert layers_of(tiny("gpt2"), client) == (0, 1)
    assert layers_of(tiny("lfm2"), client) == (1,), "layer 0 is a convolution"
    assert layers_of(tiny("albert"), client) == (0, 1, 2)
    assert layers_of(clip, client) == ("text_model.0", "vision_model.0", "vision_model.1")
    pair = ["encoder.0", "encoder.1", "decoder.0", "cross.0", "decoder.1", "cross.1"]
    assert layers_of(tiny("t5"), client) == tuple(pair)
    assert sorted(layers_of(tiny("bart"), client)) == sorted(pair)
    decoder = tiny("bert", is_decoder=True, add_cross_attention=True)
    assert layers_of(decoder, client) == (0, "cross.0", 1, "cross.1")


def test_a_shared_module_is_each_of_its_layers(client):
    model, inputs = tiny("albert"), prompt(padding=0)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
        with attach(model, client, record=["weights"]) as attached:
            model(**inputs)
        for layer, weights in enumerate(expected):
            close(attached.recorded[layer]["weights"], weights)
        with attach(model, client, edits={1: [KNOCK_OUT]}, record=["weights"]) as attached:
            model(**inputs)
    assert [not taps["weights"][:, 1].any() for taps in attached.recorded.values()] == [False, True, False]


# ── taps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_taps_are_those_of_the_last_pass(client):
    model, inputs = tiny("llama"), prompt()
    with torch.no_grad(), attach(model, client, record=["q", "k", "v", "scores", "weights", "context"]) as attached:
        assert attached.recorded == {}
        model(**inputs)
        first = attached.recorded
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    shapes = {tap: array.shape for tap, array in first[1].items()}
    heads, kv = (2, 4, 9, 8), (2, 2, 9, 8)
    assert shapes == {"q": heads, "k": kv, "v": kv, "scores": (2, 4, 9, 9), "weights": (2, 4, 9, 9), "context": heads}
    assert attached.recorded[1]["weights"].shape == (2, 4, 1, 11)
    weights, v = first[0]["weights"], np.repeat(first[0]["v"], 2, axis=1)
    np.testing.assert_allclose(weights @ v, first[0]["context"], atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "bert", "mistral", "t5"])
@pytest.mark.parametrize("missing", [(2, 3), (1, 0)], ids=["all padded", "one padded"])
def test_attentions_and_taps_have_all_tokens_if_every_text_is_padded(family, missing, client):
    model, inputs = tiny(family, "eager"), prompt(padding=0)
    for row, count in enumerate(missing):
        inputs["attention_mask"][row, inputs["attention_mask"].shape[1] - count :] = 0
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    name = "encoder_attentions" if family == "t5" else "attentions"
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with attach(model, client, record=["k", "masked_scores", "weights"]) as attached:
            found = model(**inputs, output_attentions=True)
    real = inputs["attention_mask"].bool()
    for ours, theirs in zip(found[name], expected[name], strict=True):
        assert ours.shape == theirs.shape
        close(ours.transpose(1, 2)[real], theirs.transpose(1, 2)[real])
    keys = inputs["input_ids"].shape[1]
    taps = attached.recorded["encoder.0" if family == "t5" else 0]
    assert [taps[tap].shape[-1 if tap != "k" else 2] for tap in ("k", "masked_scores", "weights")] == [keys] * 3
    assert not taps["weights"].transpose(0, 3, 1, 2)[~real].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_mask_of_integers_is_refused_by_its_name(dtype, client):
    model, inputs = tiny("llama"), prompt(padding=0)
    length = inputs["input_ids"].shape[1]
    mask = torch.ones(1, 1, length, length).tril()
    with attach(model, client), torch.no_grad():
        expected = model(inputs["input_ids"], attention_mask=mask.bool()).logits
        close(expected, model(inputs["input_ids"]).logits)
        with pytest.raises(InvalidRequest, match="attention_mask: expected a bool mask") as refusal:
            model(inputs["input_ids"], attention_mask=mask.to(dtype))
    assert refusal.value.param == "attention_mask"


def test_the_encoder_stays_recorded_while_the_decoder_steps(client):
    model, inputs = tiny("t5"), prompt(padding=0)
    with torch.no_grad(), attach(model, client, record=["weights"]) as attached:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    found = {layer: taps["weights"].shape[2:] for layer, taps in attached.recorded.items()}
    assert found == {
        f"{stack}.{i}": shape
        for i in (0, 1)
        for stack, shape in {"encoder": (9, 9), "decoder": (1, 3), "cross": (1, 9)}.items()
    }


def test_bfloat16_is_recorded_and_returned(client):
    model, inputs = tiny("gpt_oss").bfloat16(), prompt()
    with torch.no_grad(), attach(model, client, record=["k"]) as attached:
        assert model(**inputs).logits.dtype == torch.bfloat16
    assert attached.recorded[0]["k"].dtype.name == "bfloat16"


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("head", range(4))
def test_a_knocked_out_head_is_one_without_output_weights(head, client):
    model, inputs = tiny("llama"), prompt(padding=0)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].self_attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
        expected, whole = changed(**inputs).logits, model(**inputs).logits
        with attach(model, client, edits={1: [{"tap": "weights", "heads": [head], "set": 0}]}):
            found = model(**inputs).logits
        close(found, expected)
        assert (found - whole).abs().max() > 0.01
        close(model(**inputs).logits, whole)


def test_gradients_are_those_of_the_edited_model(client):
    model, inputs = tiny("llama"), prompt(padding=0)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
    with attach(model, client, edits={0: [KNOCK_OUT]}):
        found = gradients(model, inputs)
    expected = gradients(changed, inputs)
    for name, gradient in found.items():
        if name != "model.layers.0.self_attn.o_proj.weight":
            close(gradient, expected[name])


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gradients(model, inputs):
    """The gradients of a loss at the real tokens: eager attention gives padding numbers of its own."""
    model.zero_grad()
    pair = {"decoder_input_ids": inputs["input_ids"][1:].expand(2, -1)} if model.config.is_encoder_decoder else {}
    real = slice(None) if pair else inputs["attention_mask"].bool()
    model(**inputs, **pair).logits[real].square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_gradients_reach_every_parameter(family, client):
    model, inputs = tiny(family), prompt()
    expected = gradients(model, inputs)
    with attach(model, client):
        found = gradients(model, inputs)
    assert found.keys() == expected.keys()
    learned = [name for name in expected if "sinks" in name or "relative_attention_bias" in name]
    assert all(expected[name].any() for name in learned)
    assert len(learned) == {"gpt_oss": 2, "t5": 2}.get(family, 0)
    for name, gradient in expected.items():
        close(found[name], gradient)


def test_attentions_carry_gradients(client):
    model, inputs = tiny("llama"), prompt(padding=0)

    def of_attentions() -> torch.Tensor:
        model.zero_grad()
        model(**inputs, output_attentions=True).attentions[1].square().sum().backward()
        return model.model.layers[0].self_attn.v_proj.weight.grad.clone()

    expected = of_attentions()
    with attach(model, client):
        close(of_attentions(), expected)


@pytest.mark.slow
def test_second_derivatives_pass_through(client):
    model, inputs = tiny("llama"), prompt(padding=0)
    weight = model.model.layers[0].self_attn.q_proj.weight

    def hessian_product() -> torch.Tensor:
        (first,) = torch.autograd.grad(model(**inputs).logits.square().mean(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    expected = hessian_product()
    with attach(model, client):
        torch.testing.assert_close(hessian_product(), expected, rtol=1e-4, atol=1e-4)


def test_checkpointed_layers_have_the_same_gradients(client):
    model, inputs = tiny("llama"), prompt()
    expected = gradients(model, inputs)
    model.train()
    model.activation_checkpointing_enable()
    with attach(model, client, record=["weights"]):
        found = gradients(model, inputs)
    for name, gradient in expected.items():
        close(found[name], gradient)


def test_dropout_is_that_of_the_seed(client):
    model, inputs = tiny("llama", attention_dropout=0.4), prompt()

    def trained(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return gradients(model.train(), inputs)["model.layers.0.self_attn.v_proj.weight"]

    whole = gradients(model, inputs)["model.layers.0.self_attn.v_proj.weight"]
    with attach(model, client):
        first, second, other = trained(1), trained(1), trained(2)
        model.eval()
        close(gradients(model, inputs)["model.layers.0.self_attn.v_proj.weight"], whole)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# ── ways to use it ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_from_pretrained_takes_the_registered_name(client, tmp_path):
    model, inputs = tiny("gemma2"), prompt()
    model.save_pretrained(tmp_path)
    name = register(client, "service_of_a_test")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(loaded(**inputs).logits[real], model(**inputs).logits[real])
        with Client("http://127.0.0.1:1", retries=0) as nowhere:
            register(nowhere, name)
            with pytest.raises(ConnectionFailed):
                loaded(**inputs)
    assert "service_of_a_test" not in (tmp_path / "config.json").read_text("utf-8")


def test_a_pipeline_runs_on_the_service(client):
    words = ["[PAD]", *(f"w{i}" for i in range(95))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w94"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", padding_side="left")
    write = pipeline("text-generation", tiny("llama"), tokenizer=fast, batch_size=2)
    texts, options = ["w5 w6 w7", "w9"], {"max_new_tokens": 4, "do_sample": False}
    expected = write(texts, **options)
    with attach(write.model, client, record=["weights"]) as attached:
        assert write(texts, **options) == expected
    assert attached.recorded[0]["weights"].shape == (2, 4, 1, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, as it compiles
def test_a_compiled_model_breaks_its_graph_at_the_attention(client):
    model, inputs = tiny("llama"), prompt(padding=0)
    with torch.no_grad():
        expected = model(**inputs).logits
        with attach(model, client, record=["weights"]) as attached:
            close(torch.compile(model, backend="eager")(**inputs).logits, expected)
    assert attached.recorded[1]["weights"].shape == (2, 4, 9, 9)


def test_a_failed_pass_leaves_the_last_one_recorded(client):
    model, inputs = tiny("llama"), prompt()
    with attach(model, client, record=["weights"]) as attached, torch.no_grad():
        model(**inputs)
        before = attached.recorded
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[1000]]))
        assert attached.recorded is before


def test_threads_share_one_model(client):
    model = tiny("llama")
    prompts = [{"input_ids": torch.randint(3, 96, (1, length))} for length in range(3, 11)]

    @torch.no_grad()
    def logits_of(one: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**one).logits

    expected = [logits_of(one) for one in prompts]
    with attach(model, client, record=["weights"]) as attached, ThreadPoolExecutor(4) as threads:
        for found, logits in zip(
            threads.map(torch.no_grad()(lambda one: model(**one).logits), prompts), expected, strict=True
        ):
            close(found, logits)
        assert len({taps["weights"].shape for taps in attached.recorded.values()}) == 1, "of one pass"


def test_detached_models_are_as_before(client):
    model, inputs = tiny("llama", "sdpa"), prompt()
    attached = attach(model, client, record=["weights"])
    with attach(model, client, layers=[1], edits={1: [KNOCK_OUT]}) as inner, torch.no_grad():
        model(**inputs)
    assert inner.layers == (1,)
    assert list(attached.recorded) == [0], "the inner one took layer 1"
    attached.detach()
    attached.detach()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_family_without_the_interface_is_refused_by_name(client):
    model = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM .*\(BloomAttention\).*ALL_ATTENTION_FUNCTIONS"):
        attach(model, client)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "bloom",
        "codegen",
        "deberta",
        "falcon",
        "gpt_neo",
        "gptj",
        "longformer",
        "mpnet",
        "mpt",
        "reformer",
        "xglm",
        "xlnet",
    ],
)
def test_the_families_that_the_page_names_have_no_interface(family, client):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    own = {
        "gpt_neo": sizes | {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
        "mpt": {"vocab_size": 96, "d_model": 32, "n_layers": 1, "n_heads": 4},
        "reformer": {"vocab_size": 96, "hidden_size": 32, "attn_layers": ["local"], "axial_pos_embds_dim": [16, 16]},
        "xglm": {"vocab_size": 96, "d_model": 32, "num_layers": 1, "attention_heads": 4},
        "xlnet": {"vocab_size": 96, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32},
    }
    model = AutoModel.from_config(CONFIG_MAPPING[family](**own.get(family, sizes)))
    with pytest.raises(UnsupportedModel, match=r"^\w+ does not use the attention interface of transformers \(\w+"):
        attach(model, client)


def test_attentions_that_stay_local_are_named(client):
    model = SiglipVisionModel(SiglipVisionConfig(**ENCODERS["siglip_vision_model"] | {"vision_use_head": True}))
    with pytest.raises(UserWarning, match="SiglipMultiheadAttentionPoolingHead"):
        attach(model, client)  # warnings are errors here
    assert not model.config._attn_implementation.startswith("attention_service"), "nothing is left behind"
    assert not model._forward_hooks
    with pytest.warns(UserWarning, match="SiglipMultiheadAttentionPoolingHead"), attach(model, client) as attached:
        assert attached.layers == (0, 1)


@pytest.mark.parametrize("name", ["block_indices", "sinks", "cache"])
def test_arguments_without_a_field_are_refused(name, client):
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(UnsupportedModel, match=rf"Linear .*\({name}\)"):
        attend(connect(client), torch.nn.Linear(1, 1), q, q, q, None, **{name: torch.ones(1)})


def test_a_dropout_of_everything_is_refused(client):
    model = tiny("llama", attention_dropout=1.0).train()
    with attach(model, client), pytest.raises(InvalidRequest, match="dropout: expected a share below 1"):
        model(**prompt())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, r"layers: expected layers among \[0, 1\]; got \[2\]"),
        ({"edits": {5: [KNOCK_OUT]}}, r"edits: .*got \[5\]"),
        ({"layers": [0], "edits": {1: [KNOCK_OUT]}}, r"edits: expected layers among \[0\]; got \[1\]"),
        ({"edits": {1: [{"tap": "weights"}]}}, "exactly one of set, value, scale and add"),
        ({"record": ["wieghts"]}, "record: .*wieghts"),
        ({"record": "weights"}, "expected a list"),
    ],
)
def test_wrong_options_are_refused(options, message, client):
    model = tiny("llama")
    with pytest.raises(InvalidRequest, match=message):
        attach(model, client, **options)
    assert model.config._attn_implementation == "eager"


def test_an_awaited_client_is_refused():
    with pytest.raises(TypeError, match="AsyncClient"):
        attach(tiny("llama"), AsyncClient("http://service.test"))


def test_a_model_of_another_library_is_refused(client):
    with pytest.raises(TypeError, match="expected a PreTrainedModel of transformers, got Linear"):
        attach(torch.nn.Linear(2, 2), client)


def test_a_copy_of_an_attached_model_is_refused(client):
    model = tiny("llama")
    with attach(model, client, edits={0: [KNOCK_OUT]}):
        other = copy.deepcopy(model)
        with pytest.raises(UnsupportedModel, match="not of the model that was attached"):
            other(**prompt())


def test_an_edit_of_a_head_that_is_not_there_fails_in_the_pass(client):
    model = tiny("llama")
    with attach(model, client, edits={0: [{"tap": "weights", "heads": [9], "set": 0}]}), pytest.raises(InvalidRequest):
        model(**prompt())
    model(**prompt())
