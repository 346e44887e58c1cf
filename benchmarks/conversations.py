"""Conversations with a model that keeps what it has read, beside reading all of them again at each turn.

``python -m benchmarks.conversations`` prints a table; ``--output FILE`` writes it.
"""

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, MistralConfig, PreTrainedConfig

from attention_contract.schemas.openai import CompletionRequest
from attention_service.models.generation.decoding.decoder import PART, Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from benchmarks.callers import NEW, texts_of
from benchmarks.generation import letters
from benchmarks.page import IN_TURN, fewer, parser, publish
from benchmarks.tables import short, table

ROUNDS, TURNS, WINDOW = 7, 5, 512
CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS: Final[Mapping[str, PreTrainedConfig]] = {
    "Llama": LlamaConfig(**CONFIG),
    f"Mistral, a window of {WINDOW}": MistralConfig(**CONFIG, sliding_window=WINDOW),
    "LFM2, 4 of 6 layers convolutions": Lfm2Config(
        **CONFIG, layer_types=["conv", "conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
    ),
}
TEXT: Final = f"""Models of 6 layers of 6 heads and 384 features with random parameters, float32, one thread, in one
process. Each of {TURNS} turns sends all before with new tokens, and gets {NEW} greedy ones. *Read* are the tokens of
prompts that both read; *of reading all* is the processor time of the turns beside those of a conversation for which
nothing is kept.

{IN_TURN}
"""
_KEPT_BYTES: Final = 2**28


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS).parse_args()
    rounds = options.rounds or (fewer(ROUNDS) if options.quick else ROUNDS)
    publish("Conversations", TEXT, lines(rounds), options.output, ("torch", "transformers"))


def lines(rounds: int) -> Iterator[str]:
    """One row for each model and number of new tokens."""
    torch.set_num_threads(1)
    head = ["model", "new tokens a turn", "read", "read of all", "of reading all", "kept, s", "all, s"]
    yield table(head, (row for name in CONFIGS for row in rows(name, rounds)))


def rows(name: str, rounds: int) -> Iterator[tuple[str, ...]]:
    """Measure one model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)
    loaded = LoadedModel("llama", model, letters(), Device.open("cpu", 1))
    for new in (60, 300):
        kept, whole = list[float](), list[float]()
        read = read_all = 0
        for number in range(rounds + 1):  # the first warms up
            seconds, read = conversation(loaded, 3 + number, new, _KEPT_BYTES)
            again, read_all = conversation(loaded, 3 + number, new, 0)
            if number:
                kept.append(seconds)
                whole.append(again)
        ratios = sorted(one / all_ for one, all_ in zip(kept, whole, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        ratio = f"{median(ratios):.2f} ({low:.2f}–{high:.2f})"
        yield name, str(new), str(read), str(read_all), ratio, short(median(kept)), short(median(whole))


def conversation(loaded: LoadedModel, first: int, new: int, kept_bytes: int) -> tuple[float, int]:
    """Return the processor's seconds of the turns, and the tokens of their prompts that were read."""
    decoder, ids, read = Decoder(loaded, kept_bytes), [first], 0
    try:
        decoder.joining, decoder.reading  # noqa: B018  # the trials, once a model
        began = time.process_time()
        for turn in range(TURNS):
            ids += texts_of(turn, (new, new), 1)[0]
            request = CompletionRequest(model="llama", prompt=ids, max_tokens=NEW, temperature=0)
            running = RunningGeneration(decoder, request, plan_generation(loaded, request), lambda _: None, "me")
            before = len(ids)
            while running.unread:
                read_prompts(decoder, [running], PART)
            while not running.has_ended:
                decode(decoder, [running])
            ids = [*running.first]
            usage = next(each["usage"] for each in running.end().last if each.get("usage"))
            read += before - usage["prompt_tokens_details"]["cached_tokens"]
        return time.process_time() - began, read
    finally:
        decoder.close()


if __name__ == "__main__":
    main()
