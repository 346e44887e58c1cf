"""Questions to models whose layers pass on more, or otherwise, than one state of each token of a text."""

import copy

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.questions import QUESTIONS
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import JacobianRequest, ModelLensRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.joined_questions import group_of
from attention_service.models.answers.lenses.jacobian_rows import plan_rows
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.stream_search import find_stream


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", ["xlnet", "fsmt", "nllb-moe"])
def test_a_lens_reads_states_that_are_time_first_and_decoders_of_experts(small, kind):
    assert QUESTIONS["lens"](*small(kind)) < 1e-5


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize(
    "kind",
    [
        "albert", "bert", "distilbert", "electra", "mobilebert", "roberta", "big_bird", "camembert", "convbert",
        "data2vec-text", "deberta", "deberta-v2", "ernie", "esm", "eurobert", "layoutlm", "longformer", "luke",
        "megatron-bert", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta-prelayernorm",
        "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ],
)  # fmt: skip
def test_a_lens_reads_masked_language_models_by_their_whole_head(small, kind):
    """The last layer's reading is the logits of the pass; EuroBERT has no transform, and its parts add up."""
    model, loaded = small(kind)
    assert QUESTIONS["lens"](model, loaded) < 1e-5
    assert (find_stream(loaded).without_parts == "") == (kind == "eurobert")


def test_no_jacobian_lens_is_fitted_to_a_masked_language_model(small):
    _, loaded = small("bert")
    request = JacobianRequest(text="the cat sat on the mat", skip_first=0, max_tokens=8, start=0)
    with pytest.raises(InvalidRequest, match="the mean over the tokens that follow"):
        plan_rows(loaded, request, find_stream(loaded), ModelCosts(loaded), 2**30)


def test_states_that_are_time_first_are_not_divided_into_parts(small):
    _, loaded = small("xlnet")
    with pytest.raises(InvalidRequest, match=r"token by token.*ask of hidden alone") as fault:
        plan_lens(loaded, ModelLensRequest(tokens=[3, 4, 5], of=["output"]), find_stream(loaded))
    assert fault.value.param == "of.0"


@pytest.mark.parametrize(
    ("kind", "shape"), [("prophetnet", r"\[1, 9, 32\] for 3"), ("gemma3n_text", r"\[4, 1, 5, 32\]")]
)
def test_a_layer_that_returns_other_states_than_one_a_token_is_refused_by_their_shape(small, kind, shape):
    _, loaded = small(kind)
    with pytest.raises(InvalidRequest, match=f"return states of the shape {shape}.*one state of each token"):
        find_stream(loaded)


def test_layers_that_hand_on_more_than_states_run_whole_for_each_edit_of_a_batch(small):
    """Zaya's routers get what the router of the layer before made, of every text."""
    model, loaded = small("zaya")
    assert loaded.first_unable(range(loaded.shared_layers.count)) == 1
    assert QUESTIONS["effects"](model, loaded) < 1e-4


def test_padding_chooses_no_keys_of_a_source_that_is_left_out(small):
    """An indexer of which many scores are 0 takes other keys of a padded text, in transformers too."""
    model, loaded = small("glm_moe_dsa")
    assert QUESTIONS["context"](model, loaded) < 1e-4


@pytest.mark.parametrize(
    ("kind", "joins"),
    [("glm_moe_dsa", False), ("mobilebert", False), ("whisper", True), ("llama", True), ("gpt2", True)],
)
def test_a_text_that_padding_changes_shares_no_pass_with_longer_ones(small, kind, joins):
    _, loaded = small(kind)
    request = ModelForwardRequest(tokens=[3, 4, 5], return_=[])
    assert loaded.reader.mixes_padding(9) != joins
    assert (group_of(loaded, request, read_request(loaded, request)) is not None) == joins


def test_what_is_asked_is_held_to_its_property(small):
    """A last MLP that is wrong by a hundredth shows in all that is not held to passes of the same model."""
    model, loaded = small("llama")
    loaded.model.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    others = {"effects", "shared", "point router"}  # held to the model itself, and the experts that it has not
    errors = {name: ask(model, loaded) for name, ask in QUESTIONS.items() if name not in others}
    assert min(errors.values()) > 1e-4, errors


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=48, max_position_embeddings=64, initializer_range=0.5, pad_token_id=0,
            )
        ),
        GPT2LMHeadModel(
            GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=1.0)
        ),
    ],
    ids=["llama", "gpt2"],
)  # fmt: skip
def test_models_of_large_numbers_have_parts_and_paths(model):
    """Trials compare by shares: the rounding of states of hundreds exceeds the bounds of small ones."""
    model = model.eval()
    model.set_attn_implementation("eager")
    loaded = LoadedModel("large", copy.deepcopy(model).requires_grad_(False), tokenizer(), device())
    assert max(QUESTIONS[name](model.to(device().torch), loaded) for name in ("lens", "effects", "paths")) < 1e-4
    loaded.close()
