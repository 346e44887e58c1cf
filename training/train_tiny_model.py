"""Train the model that ships with the service, on text that ``tiny_text`` writes, and write its folder.

    python -m training.train_tiny_model [--output FOLDER] [--steps 2400] [--seed 0]

The model is a Llama of 4 layers with 4 heads. The seed fixes the text, the parameters and the order of the steps, so
that the same PyTorch on the same machine gives the same model. One thread of a CPU takes some minutes.
"""

import argparse
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.measure_tiny_model import Measures, measured
from training.tiny_text import ANSWER, END, QUESTION, documents

FOLDER: Final = Path(__file__).parent.parent / "service" / "attention_service" / "tiny_model"
BEGIN: Final = "<|begin|>"
VOCABULARY: Final = 768
LENGTH: Final = 512
"""Tokens that the model has positions for."""
WIDTH: Final = 64
HEAD: Final = 16
"""Widths of the model and of a head."""
TOKENS_A_STEP: Final = 2048
STEPS: Final = 1800
RATE: Final = 4e-3
REPEATS: Final = 0.2
"""The share of steps that repeat random tokens."""
_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' if message['role'] != 'system' }}{{ message['content'] }}"
    "{{ eos_token if message['role'] != 'system' }}{% endfor %}"
    "{% if add_generation_prompt %}" + ANSWER + "{% endif %}"
)


def tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from texts. Every text begins with a token of its own, which heads can rest on."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    marks = [BEGIN, END, QUESTION, ANSWER]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(mark, normalized=False) for mark in marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, bpe.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=END, model_max_length=LENGTH,
        additional_special_tokens=[QUESTION, ANSWER], chat_template=_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def untrained() -> LlamaForCausalLM:
    """Return the model with its first parameters.

    Nothing but the embeddings is in the residual stream at first: what attention and MLPs add begins at zero. Two
    heads are given their task: one of layer 0 to look at the token before, by the biases of q and k alone, and one of
    layer 1 to look where that token was the present one, an induction head. Left to chance, a model of this size needs
    ten times as many steps to find them. Source: Elhage et al. 2021; Olsson et al. 2022.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=WIDTH // HEAD,
        num_key_value_heads=WIDTH // HEAD, intermediate_size=128, max_position_embeddings=LENGTH, attention_bias=True,
        tie_word_embeddings=True, initializer_range=0.1, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
        angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, HEAD, 2) / HEAD)
        first.k_proj.bias[: HEAD // 2] = 6.0
        first.q_proj.bias[:HEAD] = 6.0 * torch.cat([angles.cos(), -angles.sin()])  # the key's, one token further
        seen = torch.randn(HEAD, WIDTH) / WIDTH**0.5
        basis = torch.linalg.qr(torch.randn(WIDTH, HEAD)).Q
        first.v_proj.weight[:HEAD] = seen
        first.o_proj.weight[:, :HEAD] = 0.15 * basis
        slow = [*range(3, HEAD // 2), *range(3 + HEAD // 2, HEAD)]  # pairs that turn little over a text
        second.q_proj.weight[slow] = 2.0 * seen[slow]
        second.k_proj.weight[slow] = 2.0 * basis.T[slow]
    return model


def repetitions(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows of random tokens, each said again and again after 4 to 48 of them, with labels from then on."""
    length = 128
    period = torch.randint(4, 48, (TOKENS_A_STEP // length, 1), generator=generator)
    places = torch.arange(length - 1).expand(len(period), -1)
    tokens = torch.randint(4, VOCABULARY, (len(period), length - 1), generator=generator).gather(1, places % period)
    labels = tokens.masked_fill(places <= period, -100)
    begin = torch.zeros(len(period), 1, dtype=torch.long)
    return torch.cat([begin, tokens], 1), torch.cat([begin - 100, labels], 1)


def batches(words: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield input tokens and the labels of each step; -100 marks what nobody could predict.

    Some steps repeat random tokens. The others have documents of about the same length, of which as many
    stand in a row as fit: short ones alone, so that texts of every length are learnt.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = documents(seed)
    begin, end = words.bos_token_id, words.eos_token_id
    while True:
        pool = [[*ids, end] for ids in words(list(islice(texts, 2000))).input_ids]
        for start in range(0, len(pool) - 1, 2):  # a quarter of the documents follow another one
            if start % 8 == 0:
                pool[start] = pool[start] + pool[start + 1]
                pool[start + 1] = []
        pool = sorted((ids for ids in pool if ids), key=len)
        steps, row = [], 0
        while row < len(pool):
            fits = max(1, TOKENS_A_STEP // len(pool[min(row + 64, len(pool) - 1)]))
            steps.append(pool[row : row + fits])
            row += fits
        for index in torch.randperm(len(steps), generator=generator).tolist():
            if torch.rand((), generator=generator) < REPEATS:
                yield repetitions(generator)
            width = min(LENGTH, max(map(len, steps[index])))
            tokens = torch.full((len(steps[index]), width), end)
            labels = torch.full_like(tokens, -100)
            for line, ids in enumerate(steps[index]):
                tokens[line, : len(ids)] = labels[line, : len(ids)] = torch.tensor(ids)[:width]
            labels[tokens == begin] = -100
            yield tokens, labels


def train(words: PreTrainedTokenizerFast, seed: int, steps: int) -> LlamaForCausalLM:
    """Return the model after some steps of AdamW, with a warm-up and a cosine."""
    torch.manual_seed(seed)
    model = untrained().train()
    plain = [value for value in model.parameters() if value.ndim < 2]
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], RATE, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / 100, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    began = time.monotonic()
    for step, (tokens, labels) in enumerate(islice(batches(words, seed), steps)):
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


def stored(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model with the parameters that its file will have, for eager attention in float32."""
    model.set_attn_implementation("eager")
    return model.half().float()


def card(found: Measures, seed: int, steps: int, minutes: float) -> str:
    """Write the README of the model from what was measured."""
    heads = "\n".join(
        f"| {layer}.{head} | {found.previous[layer, head]:.2f} | {found.induction[layer, head]:.2f} "
        f"| {found.first_key[layer, head]:.2f} |"
        for layer in range(found.previous.shape[0])
        for head in range(found.previous.shape[1])
    )
    return _CARD.format(
        loss=found.loss, tokens=math.exp(found.loss), unigram=found.unigram, first=found.first_loss,
        second=found.second_loss, heads=heads, seed=seed, steps=steps, minutes=minutes,
        vocabulary=VOCABULARY, length=LENGTH, torch=torch.__version__.partition("+")[0],
    )  # fmt: skip


_CARD: Final = """# tiny

A Llama of 4 layers with 4 heads, a width of 64, {vocabulary} byte-level BPE tokens and {length} positions. Its
parameters are stored as float16. It writes short stories of people, animals and things, and answers questions about
what it was told. It ships so that whole models can be tried without a download. It knows nothing else.

`python -m training.train_tiny_model` of the repository made it: {steps} steps with seed {seed} in {minutes:.0f} minutes
on one thread of a CPU, with PyTorch {torch}. A grammar in `training/tiny_text.py` writes the text, so nobody's text is
part of it. The licence is that of the project. Head 0.0 began as one that looks at the token before, head 1.0 as an
induction head; see `untrained` in the script.

| on held-out documents | |
|---|---|
| loss, in nats a token | {loss:.2f}, an even guess among {tokens:.1f} tokens |
| loss of the tokens' shares alone | {unigram:.2f} |
| random tokens, the first time | {first:.2f} |
| the same tokens, said again | {second:.2f} |

The mean weight of each head (layer.head): on the token before; of a repeated random token on the one that followed it
the first time (an induction head); on the first token of the text.

| head | previous | induction | first |
|---|---|---|---|
{heads}
"""


def main() -> None:
    """Train the model and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    words = tokenizer(islice(documents(arguments.seed), 20_000))
    model = stored(train(words, arguments.seed, arguments.steps))
    found = measured(model, words)
    words.save_pretrained(arguments.output)
    model.half().save_pretrained(arguments.output)
    (arguments.output / "generation_config.json").unlink()  # the defaults
    minutes = (time.monotonic() - began) / 60
    (arguments.output / "README.md").write_text(card(found, arguments.seed, arguments.steps, minutes))


if __name__ == "__main__":
    main()
