"""What becomes of queries and keys before they meet: encoded, normed, turned, put behind the past."""

import pytest
import torch

from attention_contract.positions import (
    Alibi,
    LearnedPosition,
    NoPosition,
    NtkScaling,
    QKNorm,
    RelativeBias,
    Rope,
    Sinusoidal,
)
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.attention import attend
from attention_service.core.inputs import make_problem
from attention_service.core.multihead import Sizes, project
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.pair_bias import pair_bias
from attention_service.core.problem import Span, Widths
from attention_service.core.scores import qk_norm

HEADS, KV_HEADS, HEAD, WIDTH, TOKENS = 4, 2, 8, 12, 7
POSITION = {
    "none": NoPosition(),
    "sinusoidal": Sinusoidal(),
    "learned": LearnedPosition(length=16),
    "rope": Rope(),
    "rope, interleaved": Rope(style="interleaved", dim=4),
    "rope, dynamic": Rope(scaling=NtkScaling(factor=2.0, original_max_position_embeddings=16)),
    "alibi": Alibi(),
    "relative_bias": RelativeBias(num_buckets=8, max_distance=6),
}
NORMS = {"no norm": None, "by head": QKNorm(), "over all": QKNorm(over="all_heads", unit_offset=True, eps=0.1)}
SIZES = Sizes(WIDTH, HEADS, KV_HEADS, HEAD, HEAD, WIDTH, WIDTH, Biases())


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """One spec, of a module or of raw queries and keys, with random learned tensors."""

    def __init__(self, spec, kind):
        self.spec, self.kind = spec, kind
        module = kind == "module"
        widths = Widths(HEADS, KV_HEADS, HEAD, HEAD, WIDTH if module else None)
        learned = POSITIONS.of(spec.position).learned(widths) | qk_norm.learned(spec.qk_norm, widths)
        self.parameters = {name: normal(*each.shape, seed=9) for name, each in learned.items()}
        if module:
            kv = KV_HEADS * HEAD
            shapes = {"q": (HEADS * HEAD, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH)}
            self.parameters |= {f"{role}_proj.weight": normal(*shape, seed=3) for role, shape in shapes.items()}

    def tensors(self, tokens=TOKENS, batch=2):
        if self.kind == "module":
            return {"query": normal(batch, tokens, WIDTH)}
        return {
            "query": normal(batch, HEADS, tokens, HEAD),
            "key": normal(batch, KV_HEADS, tokens, HEAD, seed=1),
            "value": normal(batch, KV_HEADS, tokens, HEAD, seed=2),
        }

    def prepared(self, tensors):
        def by_head(*three):
            return three if self.kind == "raw" else project(self.parameters, SIZES, *three)

        return make_problem(self.spec, tensors, self.parameters, by_head, projected=self.kind == "module")


def part(tensors, rows):
    return {name: x[..., rows, :] for name, x in tensors.items()}


def context(problem):
    return attend(problem, kernel="materialized").context


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.fixture(params=["module", "raw"])
def kind(request):
    return request.param


PAIRS = [*((position, "no norm") for position in POSITION), ("rope", "by head"), ("rope", "over all")]


@pytest.fixture(params=PAIRS, ids=", ".join)
def case(request, kind):
    position, norm = request.param
    return Case(AttentionSpec(position=POSITION[position], qk_norm=NORMS[norm], masks=[Causal()]), kind)


@pytest.mark.sampled
def test_a_past_and_the_rest_are_the_whole(case):
    tensors = case.tensors()
    whole, first = case.prepared(tensors), case.prepared(part(tensors, slice(0, 4)))
    after = {"past_key": first.k, "past_value": first.v}
    rest = case.prepared(part(tensors, slice(4, None)) | after)
    close(rest.k, whole.k)  # hence what is given back as present keys is a past to go on with
    close(rest.q, whole.q[:, :, 4:])
    close(torch.cat([context(first), context(rest)], 2), context(whole))


@pytest.mark.sampled
def test_sequences_at_different_places_are_as_each_by_itself(case):
    tensors = case.tensors()
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 7, 9, 15]])
    both = context(case.prepared(tensors | {"positions": places}))
    for row in range(2):
        alone = {name: x[row : row + 1] for name, x in tensors.items()} | {"positions": places[row : row + 1]}
        close(both[row : row + 1], context(case.prepared(alone)))


def test_an_encoding_is_added_to_every_input_of_a_module_and_to_raw_queries_and_keys_alone():
    spec = AttentionSpec(position=LearnedPosition(length=16))
    module = Case(spec, "module")
    table = module.parameters["position.weight"]
    x = module.tensors()["query"]
    expected = project(module.parameters, SIZES, *[x + table[:TOKENS]] * 3)
    found = module.prepared({"query": x})
    for name, wanted in zip("qkv", expected, strict=True):
        close(getattr(found, name), wanted)

    raw = Case(spec, "raw")
    tensors = raw.tensors()
    table = raw.parameters["position.weight"]
    moved = raw.prepared(tensors | {"offsets": torch.tensor([2, 9])})
    close(moved.q[0], tensors["query"][0] + table[2:9])
    close(moved.q[1], tensors["query"][1] + table[9:])
    close(moved.k, tensors["key"] + table[:TOKENS])
    assert moved.v is tensors["value"]


@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_the_norm_of_a_vector_whose_square_overflows(over):
    x, norm = normal(2, 3, 4, HEAD).float() * 1e25, QKNorm(over=over)
    weight = torch.ones(HEAD if over == "head" else 3 * HEAD)
    found, exact = qk_norm.normed(x, weight, norm), qk_norm.normed(x.double(), weight.double(), norm)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
def test_gradients_reach_inputs_and_learned_tensors(case):
    if case.spec.position.name == "learned":
        case.parameters["position.weight"] = case.parameters["position.weight"][:5]
    tensors = part(case.tensors(batch=1), slice(0, 3))
    leaves = {**tensors, **case.parameters}

    def output(*values):
        given = dict(zip(leaves, values, strict=True))
        case.parameters = {name: given[name] for name in case.parameters}
        return context(case.prepared({name: given[name] for name in tensors}))

    assert torch.autograd.gradcheck(output, [x.requires_grad_() for x in leaves.values()], fast_mode=True)


@pytest.mark.parametrize("name", ["alibi", "relative_bias"])
def test_keys_that_the_spec_adds_have_no_bias(name):
    plain = AttentionSpec(position=POSITION[name])
    case = Case(plain.model_copy(update={"add_zero_attn": True}), "raw")
    problem = case.prepared(case.tensors())
    bias = pair_bias(problem, torch.float64)
    whole = bias.tile()
    assert whole.shape[3] == TOKENS + 1
    assert not whole[..., -1].any()
    assert whole[..., :-1].equal(pair_bias(Case(plain, "raw").prepared(case.tensors()), torch.float64).tile())
    assert bias.tile(keys=[Span(5, 8)]).equal(whole[..., 5:])
    assert bias.tile(keys=[Span(0, 1), Span(7, 8)]).equal(whole[..., [0, 7]])
