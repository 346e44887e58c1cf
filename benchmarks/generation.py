"""Tokens a second of whole models beside transformers' own ``generate``, with nothing asked and with attention.

``python -m benchmarks.generation`` prints a table; ``--output FILE`` writes it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attention_contract.schemas.openai import CompletionRequest
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of
from attention_service.runtime.device.torch_device import Device
from benchmarks.page import IN_TURN, fewer, parser, publish
from benchmarks.tables import short, table

TEXT = f"""A Llama of 6 layers of 6 heads with a vocabulary of 8,000, float32, one thread; {{prompt}} tokens before,
{{new}} new ones, greedy, in one process with transformers (`sdpa`). What each token has is written as the JSON that is
sent. Seconds are those of the processor.

{IN_TURN}
"""
PROMPT, NEW, ROUNDS = 12, 48, 12
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "statistics of every layer": {"attention": {}},
    "statistics and three keys": {"attention": {"top_k": 3}},
    "weights of every layer": {"attention": {"statistics": [], "weights": True}},
}


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS).parse_args()
    rounds = options.rounds or (fewer(ROUNDS) if options.quick else ROUNDS)
    text = TEXT.format(prompt=PROMPT, new=NEW)
    publish("Generation", text, lines(rounds), options.output, ("torch", "transformers"))


def lines(rounds: int) -> Iterator[str]:
    """One row for each width, number of sequences and question."""
    torch.set_num_threads(1)
    head = ["width", "sequences", "asked", "of transformers' tokens a second", "tokens/s", "transformers"]
    yield table(head, (row for width in (384, 96) for row in rows(width, rounds)))


def rows(width: int, rounds: int) -> Iterator[tuple[str, ...]]:
    """Measure one model."""
    loaded = LoadedModel("llama", llama(width), letters(), Device.open("cpu", 1))
    for count in (1, 8):
        prompts = [[5] * PROMPT] * count
        own = {name: timer(loaded, prompts, more) for name, more in REQUESTS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in own}
        theirs: dict[str, list[float]] = {name: [] for name in own}
        for number in range(rounds + 1):  # the first warms up
            for name, run in own.items():
                found = took(run), took(partial(by_transformers, loaded, prompts))
                if number:
                    seconds[name].append(found[0])
                    theirs[name].append(found[1])
        for name in own:
            ratios = sorted(b / a for a, b in zip(seconds[name], theirs[name], strict=True))
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            rates = (short(count * NEW / median(each[name])) for each in (seconds, theirs))
            yield str(width), str(count), name, f"{median(ratios):.2f} ({low:.2f}–{high:.2f})", *rates


def timer(loaded: LoadedModel, prompts: list[list[int]], more: dict[str, Any]) -> Callable[[], None]:
    """Return a function that generates, and writes what is sent."""
    request = CompletionRequest(model="llama", prompt=prompts, max_tokens=NEW, temperature=0, stream=True, **more)
    return lambda: void(
        generate(loaded, request, plan_generation(loaded, request), lambda objects: void(lines_of(objects)))
    )


def by_transformers(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    """Generate by transformers alone."""
    model: Any = loaded.model
    former = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts)
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    model.set_attn_implementation(former)


def took(run: Callable[[], None]) -> float:
    """Return the processor's seconds of a run."""
    began = time.process_time()
    run()
    return time.process_time() - began


def void(_: object) -> None:
    """Drop a result."""


def llama(width: int) -> LlamaForCausalLM:
    """Make a Llama with random parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=6, num_attention_heads=6, intermediate_size=width * 8 // 3,
        vocab_size=8000, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def letters() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


if __name__ == "__main__":
    main()
