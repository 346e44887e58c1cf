"""What the plugin sees of a pass of vLLM's: pages, metadata, runners of both versions, and a kernel that attends."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch

from attention_vllm.asked_requests import KernelCall
from attention_vllm.attention_outputs import AttentionOutputs
from attention_vllm.bound_asks import KnownModel
from attention_vllm.layer_facts import LayerFacts
from attention_vllm.page_layouts import SideBySide, TokensLast
from attention_vllm.pass_observer import PassObserver
from attention_vllm.rank_heads import WHOLE
from attention_vllm.result_channel import ResultChannel

PAGE, WIDTH, HEADS, KV_HEADS = 4, 8, 4, 2


def attended(facts, q, k, v, first):
    """Weights ``[H, Q, K]`` and context ``[H, Q, D]`` in float64, by loops over heads and queries."""
    heads, queries, _ = q.shape
    weights = torch.zeros(heads, queries, k.shape[1], dtype=torch.float64)
    for head in range(heads):
        for query in range(queries):
            position = first + query
            begin = max(0, position - facts.window + 1) if facts.window else 0
            keys = k[facts.key_head(head), begin : position + 1].double()
            scores = keys @ q[head, query].double() * facts.scale
            if facts.cap:
                scores = facts.cap * torch.tanh(scores / facts.cap)
            if facts.sinks is not None:
                scores = torch.cat([scores, facts.sinks[head : head + 1].double()])
            weights[head, query, begin : position + 1] = scores.softmax(0)[: len(keys)]
    groups = [facts.key_head(head) for head in range(heads)]
    return weights, weights @ v[groups].double()


@dataclass
class FakeText:
    """One request with the keys and values of all its tokens in each layer."""

    name: str
    tokens: list[int]
    prompt: int
    ask: object = None
    k: list[torch.Tensor] = field(default_factory=list)
    """``[Hkv, K, D]`` by layer."""
    v: list[torch.Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class FakeAttention(torch.nn.Module):
    """A kernel and a projection behind it, as vLLM's models have them."""

    def __init__(self, width):
        super().__init__()
        self.attn, self.o_proj = torch.nn.Identity(), torch.nn.Linear(width, 6, bias=False)

    def forward(self, context):
        return self.o_proj(self.attn(context))


class FakeEngine:
    """Layers with random queries, keys and values: the tokens of a pass are all that decides them."""

    def __init__(self, facts, layout=None, seed=0, version=1, share=WHOLE):
        """``share``: the heads that the texts' queries, keys and values are narrowed to."""
        self.facts = facts if isinstance(facts, dict) else {0: facts, 1: facts}
        self.layout = layout or TokensLast()
        self.version, self.draw = version, torch.Generator().manual_seed(seed)
        self.texts: dict[str, FakeText] = {}
        self.channel = ResultChannel()
        self.observer = PassObserver(self.channel)
        self.modules = torch.nn.ModuleList(
            FakeAttention(HEADS // share.ranks * WIDTH) for _ in self.facts
        ).requires_grad_(False)
        own = {layer: part_of(each, share) for layer, each in self.facts.items()}
        self.observer.model = KnownModel(own, share, dict.fromkeys(self.facts, 6))
        self.observer.outputs = AttentionOutputs.of(
            self.modules, {at: each.attn for at, each in enumerate(self.modules)}
        )
        self.observer.refusal, self.share = None, share
        self.projected: dict[int, torch.Tensor] = {}
        self.free = [int(page) for page in torch.randperm(60, generator=self.draw) + 1]
        # Places in pages that no token has may hold anything.
        heads, kv_heads = HEADS // share.ranks, KV_HEADS * share.copies // share.ranks
        first = share.rank // share.copies * kv_heads
        self.heads, self.kv_heads = slice(share.rank * heads, (share.rank + 1) * heads), slice(first, first + kv_heads)
        self.caches = {layer: torch.full((61, kv_heads, PAGE, 2 * WIDTH), torch.nan) for layer in self.facts}
        self.outputs: dict[int, torch.Tensor] = {}
        self.plain: dict[int, torch.Tensor] = {}
        self.starts: dict[str, tuple[int, int]] = {}
        self.skipped: set[int] = set()
        """Layers that another backend computes."""
        self.spoiled = 0.0
        """Added to the kernel's output, as a fault of the plugin's reading would show."""

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw)

    def add(self, name, tokens, ask=None, prompt=None, **more):
        text = FakeText(name, tokens, len(tokens) if prompt is None else prompt)
        text.ask = None if ask is None else {"id": name, "attention": ask, **more}
        self.texts[name] = text

    def queries(self, name, layer, first, stop):
        """The queries of a text's tokens, the same whenever they are computed."""
        own = torch.Generator().manual_seed(hash((name, layer)) % 2**31)
        return torch.randn(HEADS, 64, WIDTH, generator=own)[:, first:stop]

    def grow(self, text):
        while len(text.pages) * PAGE < len(text.tokens):
            text.pages.append(self.free.pop())
        for layer in self.facts:
            if len(text.k) < len(self.facts):
                text.k.append(self.random(KV_HEADS, 64, WIDTH))
                text.v.append(self.random(KV_HEADS, 64, WIDTH))
            for place in range(len(text.tokens)):
                page, at = text.pages[place // PAGE], place % PAGE
                key, value = text.k[layer][self.kv_heads, place], text.v[layer][self.kv_heads, place]
                cache = self.caches[layer]
                if isinstance(self.layout, SideBySide):
                    cache[page, :, at] = torch.cat([key, value], -1)
                else:
                    flat = cache[page].view(len(key), 2, -1)
                    flat[:, 0].view(len(key), WIDTH, PAGE)[:, :, at] = key
                    flat[:, 1].view(len(key), PAGE, WIDTH)[:, at] = value

    def run(self, scheduled, finished=()):
        """A pass over the next tokens of texts: ``{name: (first, stop)}``; the rows are in another order."""
        names = sorted(scheduled, reverse=True)
        for name in names:
            self.grow(self.texts[name])
        counts = {name: stop - first for name, (first, stop) in scheduled.items()}
        starts = np.cumsum([0, *(counts[name] for name in names)]).tolist()
        widest = max(len(self.texts[name].pages) for name in names)
        table = torch.zeros(len(names), widest, dtype=torch.int32)
        for at, name in enumerate(names):
            table[at, : len(self.texts[name].pages)] = torch.tensor(self.texts[name].pages)
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(starts), block_table=table,
            seq_lens=torch.tensor([scheduled[name][1] for name in names]),
        )  # fmt: skip
        new = [self.new(self.texts[name]) for name in scheduled if self.texts[name].k and not self.known(name)]
        runner = self.runner(names, metadata)
        output = SimpleNamespace(
            finished_req_ids=set(finished), scheduled_new_reqs=new, num_scheduled_tokens=counts,
        )  # fmt: skip
        self.observer.begin(output, runner)
        self.starts = {name: (starts[at], starts[at + 1]) for at, name in enumerate(names)}
        for layer, whole in self.facts.items():
            query, out, facts = [], [], part_of(whole, self.share)
            for name in names:
                text, (first, stop) = self.texts[name], scheduled[name]
                q = self.queries(name, layer, first, stop)[self.heads]
                k, v = (x[layer][self.kv_heads, :stop] for x in (text.k, text.v))
                _, context = attended(facts, q, k, v, first)
                query.append(q.transpose(0, 1))
                out.append(context.transpose(0, 1).float() + self.spoiled)
            self.plain[layer] = torch.cat(out)
            self.outputs[layer] = self.plain[layer].clone()
            if layer not in self.skipped:
                q = torch.cat(query)
                call = KernelCall(layer, self.layout, q, self.caches[layer], metadata, self.outputs[layer])
                self.observer.observe(call)
                q.fill_(torch.nan)  # as a graph that is replayed for the next layer writes over it
            self.projected[layer] = self.modules[layer](self.outputs[layer].flatten(1))
        self.observer.end()
        return {name: self.channel.take(name) for name in names}

    _seen: frozenset = frozenset()

    def known(self, name):
        seen = name in self._seen
        self._seen |= {name}
        return seen

    def new(self, text):
        extra = None if text.ask is None else {"attention": text.ask}
        settings = SimpleNamespace(extra_args=extra, max_tokens=20)
        return SimpleNamespace(req_id=text.name, sampling_params=settings, prompt_token_ids=text.tokens[: text.prompt])

    def runner(self, names, metadata):
        if self.version == 1:
            requests = {
                name: SimpleNamespace(
                    prompt_token_ids=text.tokens[: text.prompt], output_token_ids=text.tokens[text.prompt :]
                )
                for name, text in self.texts.items()
            }
            places = {name: at for at, name in enumerate(names)}
            return SimpleNamespace(input_batch=SimpleNamespace(req_id_to_index=places), requests=requests)
        slots = {name: 7 + 3 * at for at, name in enumerate(sorted(self.texts))}
        metadata.attention_rows = np.array([slots[name] for name in names])
        return SimpleNamespace(req_states=SimpleNamespace(req_id_to_index=slots))


def facts_of(**more):
    return LayerFacts(HEADS, KV_HEADS, WIDTH, **({"scale": WIDTH**-0.5} | more))


def part_of(facts, share):
    """The facts of a layer on one rank."""
    sinks = facts.sinks
    if sinks is not None:
        sinks = sinks.chunk(share.ranks)[share.rank]
    return replace(
        facts, heads=facts.heads // share.ranks, kv_heads=facts.kv_heads * share.copies // share.ranks, sinks=sinks
    )
