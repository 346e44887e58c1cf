"""Attention layers of Transformers, their weights copied: the same outputs and gradients, whole and after a past."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    GPTJConfig,
    LlamaConfig,
    MptConfig,
    Olmo2Config,
    Qwen3Config,
    T5Config,
)
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.mpt import modeling_mpt
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5

from attention_contract.positions import Alibi, QKNorm, RelativeBias, Rope
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal, Dot, ScaledDot
from attention_service.core.attention import attend
from attention_service.core.inputs import make_problem
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.multihead import Sizes, project, project_out

TOKENS, WIDTH, HEADS, HEAD = 7, 24, 4, 8
THETA = 1000.0
CAUSAL = [Causal()]
MASK = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill_(
    torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf
)


@dataclass
class Published:
    """A layer, and what it is called and computed by here."""

    layer: torch.nn.Module
    forward: dict
    """What its forward pass is given beside the hidden states."""
    spec: AttentionSpec
    kv_heads: int = HEADS
    names: dict[str, str] = field(default_factory=dict)
    """Our name of a parameter to its own, where they differ."""
    width: int = WIDTH
    kv_dim: int = HEAD

    def parameters(self) -> dict[str, Tensor]:
        own = dict(self.layer.named_parameters())
        if "Wqkv.weight" in own:
            parts = own.pop("Wqkv.weight").chunk(3)
            own |= {f"{role}_proj.weight": part for role, part in zip("qkv", parts, strict=True)}
        back = {theirs: ours for ours, theirs in self.names.items()}
        return {back.get(name, name): value for name, value in own.items()}

    def ours(self, x: Tensor, parameters: dict[str, Tensor], kernel: str = "materialized", **more):
        sizes = Sizes(self.width, HEADS, self.kv_heads, self.kv_dim, self.kv_dim, self.width, self.width, Biases())

        def by_head(query, key, value):
            return project(parameters, sizes, query, key, value)

        problem = make_problem(self.spec, {"query": x, **more}, parameters, by_head, projected=True)
        return problem, project_out(parameters, attend(problem, kernel=kernel).context)


def angles(dim):
    """Cosines and sines of all places, each twice: by halves."""
    at = torch.arange(TOKENS, dtype=torch.float64)[:, None] * THETA ** (-torch.arange(0, dim, 2).double() / dim)
    both = torch.cat([at, at], -1)[None]
    return both.cos(), both.sin()


def grouped(config_class, attention, spec, **options):
    config = config_class(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=HEAD, attn_implementation="eager",
        **options,
    )  # fmt: skip
    layer = attention(config, layer_idx=0)
    return Published(layer, {"position_embeddings": angles(HEAD), "attention_mask": MASK}, spec, kv_heads=2)


def llama():
    return grouped(LlamaConfig, modeling_llama.LlamaAttention, AttentionSpec(position=Rope(theta=THETA), masks=CAUSAL))


def qwen3():
    spec = AttentionSpec(position=Rope(theta=THETA), qk_norm=QKNorm(eps=1e-5), masks=CAUSAL)
    return grouped(Qwen3Config, modeling_qwen3.Qwen3Attention, spec, rms_norm_eps=1e-5)


def gemma3():
    spec = AttentionSpec(
        score=ScaledDot(scale=1 / 3), position=Rope(theta=THETA), qk_norm=QKNorm(unit_offset=True), masks=CAUSAL,
    )  # fmt: skip
    return grouped(
        Gemma3TextConfig, modeling_gemma3.Gemma3Attention, spec, num_hidden_layers=1, query_pre_attn_scalar=9,
    )  # fmt: skip


def olmo2():
    spec = AttentionSpec(position=Rope(theta=THETA), qk_norm=QKNorm(eps=1e-5, over="all_heads"), masks=CAUSAL)
    config = Olmo2Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, rms_norm_eps=1e-5,
        attn_implementation="eager",
    )  # fmt: skip
    config.head_dim = HEAD
    layer = modeling_olmo2.Olmo2Attention(config, layer_idx=0)
    return Published(layer, {"position_embeddings": angles(HEAD), "attention_mask": MASK}, spec, kv_heads=2)


def gptj():
    config = GPTJConfig(n_embd=HEADS * HEAD, n_head=HEADS, rotary_dim=4, n_positions=16)
    layer = modeling_gptj.GPTJAttention(config, layer_idx=0)
    spec = AttentionSpec(position=Rope(dim=4, style="interleaved"), masks=CAUSAL)
    given = {"attention_mask": MASK, "position_ids": torch.arange(TOKENS)[None]}
    return Published(layer, given, spec, names={"o_proj.weight": "out_proj.weight"}, width=HEADS * HEAD)


def t5(*, decoder):
    config = T5Config(
        d_model=WIDTH, d_kv=HEAD, num_heads=HEADS, is_decoder=decoder, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, attn_implementation="eager",
    )  # fmt: skip
    layer = modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    names = {f"{role}_proj.weight": f"{role}.weight" for role in "qkvo"}
    names["relative_bias.weight"] = "relative_attention_bias.weight"
    position = RelativeBias(num_buckets=8, max_distance=20, bidirectional=not decoder)
    spec = AttentionSpec(score=Dot(), position=position, masks=CAUSAL if decoder else [])
    return Published(layer, {"mask": MASK if decoder else None}, spec, names=names)


def mpt():
    heads = 4
    layer = modeling_mpt.MptAttention(MptConfig(d_model=HEADS * HEAD, n_heads=heads), layer_idx=0)
    bias = modeling_mpt.build_mpt_alibi_tensor(heads, TOKENS)
    given = {"position_bias": bias, "attention_mask": MASK.isinf()}
    spec = AttentionSpec(position=Alibi(), masks=CAUSAL)
    return Published(layer, given, spec, names={"o_proj.weight": "out_proj.weight"}, width=HEADS * HEAD)


LAYERS = {
    "Llama": llama,
    "Qwen 3": qwen3,
    "Gemma 3": gemma3,
    "OLMo 2": olmo2,
    "GPT-J": gptj,
    "T5 encoder": lambda: t5(decoder=False),
    "T5 decoder": lambda: t5(decoder=True),
    "MPT": mpt,
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def published(request, doubled):
    doubled(
        modeling_gemma3, modeling_gptj, modeling_llama, modeling_mpt, modeling_olmo2, modeling_qwen3,
        modeling_t5,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # GPT-J divides integers
    made = request.param()
    torch.set_default_dtype(torch.float32)
    made.layer.eval()
    for value in made.layer.parameters():
        torch.nn.init.normal_(value, std=0.4)
    return made


def inputs(published):
    return torch.randn(2, TOKENS, published.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_outputs_and_gradients_are_the_layer_s(published):
    x = inputs(published).requires_grad_()
    theirs = published.layer(x, **published.forward)[0]
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = list(published.layer.parameters())
    expected = torch.autograd.grad(theirs, [x, *own], upstream)

    names = ["input", *dict(published.layer.named_parameters())]
    for kernel in (entry.name for entry in KERNELS):
        if unsuitable(kernel, published.spec, torch.float64, Needs()):
            continue
        _, output = published.ours(x, published.parameters(), kernel)
        found = torch.autograd.grad(output, [x, *own], upstream)
        torch.testing.assert_close(output, theirs, rtol=1e-10, atol=1e-10)
        for name, mine, wanted in zip(names, found, expected, strict=True):
            case = f"{kernel}: {name}"
            torch.testing.assert_close(
                mine, wanted, rtol=1e-10, atol=1e-10, msg=lambda why, case=case: f"{case}: {why}"
            )
            assert wanted.count_nonzero() > 0


@torch.no_grad()
def test_a_past_and_the_rest_are_the_whole(published):
    x, parameters = inputs(published), published.parameters()
    _, whole = published.ours(x, parameters)
    first, _ = published.ours(x[:, :4], parameters)
    problem, rest = published.ours(x[:, 4:], parameters, past_key=first.k, past_value=first.v)
    if published.spec.masks:  # otherwise the first tokens would have seen the rest
        torch.testing.assert_close(published.ours(x[:, :4], parameters)[1], whole[:, :4], rtol=0, atol=1e-12)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=0, atol=1e-12)
    if "position_embeddings" in published.forward:  # the others take no cache without the whole model around them
        cache = DynamicCache()
        published.layer(x, past_key_values=cache, **published.forward)
        torch.testing.assert_close(problem.k, cache.layers[0].keys, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(problem.v, cache.layers[0].values, rtol=1e-10, atol=1e-10)
    places = replace(problem, positions=torch.arange(4, TOKENS).expand(2, -1))
    torch.testing.assert_close(
        attend(places, kernel="materialized").context, attend(problem, kernel="materialized").context
    )
