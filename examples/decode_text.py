"""Write a nursery rhyme character by character, with the attention of every new character shown live.

A small decoder learns "The House That Jack Built" here, in seconds. It then generates text. Its attention runs in
sessions of the service: one for each layer, which holds the keys and values of the past, so that a step sends one
character. In a terminal, the text is shaded by the weights of the newest character; elsewhere, or with ``--plain``,
each character gets one line.

Needs a running service (``attention serve``, or ATTENTION_URL) and torch: ``python examples/decode_text.py``
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice

import torch
from torch import Tensor, nn

from attention_client import Client, ModuleNotFound, Session

LINES = [
    ("the house that", "Jack built."),
    ("the malt", "that lay in"),
    ("the rat", "that ate"),
    ("the cat", "that killed"),
    ("the dog", "that worried"),
    ("the cow with the crumpled horn", "that tossed"),
    ("the maiden all forlorn", "that milked"),
    ("the man all tattered and torn", "that kissed"),
]
"""The newcomer of each verse, and its deed to the one before."""
WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 192


def rhyme() -> str:
    """Return all verses; each repeats the ones before."""
    verses = []
    for newest in range(len(LINES)):
        first, *others = [" ".join(LINES[i]) for i in range(newest, -1, -1)]
        verses.append("\n".join([f"This is {first}", *others]))
    return "\n\n".join(verses) + "\n\n"


TEXT = rhyme()
CHARACTERS = sorted(set(TEXT))


def encode(text: str) -> Tensor:
    """Return the numbers of characters, ``[length]``."""
    return torch.tensor([CHARACTERS.index(character) for character in text])


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Decoder(nn.Module):
    """A decoder of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH**0.5)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next character, ``[batch, length, characters]``."""
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            normed = block.attention_norm(x)
            x = x + block.attention(normed, normed, normed, attn_mask=causal, is_causal=True, need_weights=False)[0]
            x = x + block.feed_forward(block.norm(x))
        logits: Tensor = self.head(x)
        return logits


def train(model: Decoder, steps: int) -> float:
    """Learn to continue verses drawn at random; return the last loss."""
    data = encode(TEXT)
    verses = torch.tensor([i for i in range(len(TEXT) - CONTEXT) if TEXT.startswith("This is", i)])
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    loss = torch.tensor(torch.inf)
    for _ in range(steps):
        starts = verses[torch.randint(len(verses), (8,))]
        tokens = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


# ── generation with the past on the server ───────────────────────────────────────────────────────────────────────────


@contextmanager
def sessions_of(model: Decoder, client: Client) -> Iterator[list[Session]]:
    """Open a session for the attention of each layer, all on one connection; remove everything at the end."""
    with ExitStack() as stack:
        stream = stack.enter_context(client.sessions.stream())
        opened: list[Session] = []
        for layer, block in enumerate(model.blocks):
            name, own = f"decode-text.{layer}", block.attention.state_dict()
            parameters = {"o_proj.weight": own["out_proj.weight"], "o_proj.bias": own["out_proj.bias"]}
            for kind in ("weight", "bias"):
                q, k, v = own[f"in_proj_{kind}"].chunk(3)
                parameters |= {f"q_proj.{kind}": q, f"k_proj.{kind}": k, f"v_proj.{kind}": v}
            config = {"d_model": WIDTH, "num_heads": HEADS, "spec": {"masks": [{"name": "causal"}]}}
            with suppress(ModuleNotFound):
                client.modules.delete(name)  # of an earlier run that was interrupted
            client.modules.create(name, config, parameters=parameters, durable=False)
            stack.callback(client.modules.delete, name)
            session = stack.enter_context(client.sessions.open(name))
            stack.enter_context(session.stream(stream))
            opened.append(session)
        yield opened


@dataclass(frozen=True)
class Written:
    """One more character."""

    text: str
    """The whole text so far, without the new character."""
    character: str
    weights: Tensor
    """``[layers, heads, length]``: the attention of the last character before the new one."""
    logits: Tensor
    """``[characters]``: those of the new character."""


@torch.no_grad()
def write(model: Decoder, sessions: Sequence[Session], prompt: str) -> Iterator[Written]:
    """Yield the likeliest next character, again and again. A step sends what is new alone: first the whole prompt."""
    text, new = prompt, prompt
    while len(text) <= CONTEXT:
        x = (model.embedding(encode(new)) + model.positions[len(text) - len(new) : len(text)])[None]
        weights: list[Tensor] = []
        for block, session in zip(model.blocks, sessions, strict=True):
            last = {"queries": [len(new) - 1]}
            reply = session.step(block.attention_norm(x), return_=["output", "weights"], select=last)
            x = x + torch.from_numpy(reply.output)
            x = x + block.feed_forward(block.norm(x))
            weights.append(torch.from_numpy(reply.weights)[0, :, -1])
        logits: Tensor = model.head(x)[0, -1]
        character = CHARACTERS[int(logits.argmax())]
        yield Written(text, character, torch.stack(weights), logits)
        text, new = text + character, character


# ── the terminal ─────────────────────────────────────────────────────────────────────────────────────────────────────


def show_plain(steps: Iterator[Written]) -> Iterator[Written]:
    """Print a line for each character: the head of each layer that looks at one place most, and that place."""
    print("new  " + "  ".join(f"  layer {layer}: head, place, weight" for layer in range(LAYERS)))
    for step in steps:
        line = f"{step.character!r:<5}"
        for heads in step.weights:
            head, place = divmod(int(heads.argmax()), heads.shape[1])
            around = step.text[max(place - 3, 0) : place] + "[" + step.text[place] + "]"
            line += f"  {head} {place:>3} {around!r:<12} {float(heads.max()):>4.0%}       "
        print(line.rstrip())
        yield step


def show_live(steps: Iterator[Written], pause: float) -> Iterator[Written]:
    """Redraw the text at each character, once for each layer, shaded by the weights that its heads give on average."""
    from rich import console, live, panel, text  # noqa: PLC0415 - not everybody has it

    with live.Live(auto_refresh=False) as display:
        for step in steps:
            panels: list[panel.Panel] = []
            for layer, heads in enumerate(step.weights):
                shares = heads.mean(0)
                shaded = text.Text()
                for character, share in zip(step.text, (shares / shares.max()).tolist(), strict=True):
                    seen = "↵\n" if character == "\n" else character
                    shaded.append(seen, f"on rgb({int(30 + 200 * share)},{int(30 + 70 * share)},30)")
                shaded.append(step.character.replace("\n", "↵\n"), "bold reverse")
                panels.append(panel.Panel(shaded, title=f"layer {layer}", title_align="left"))
            display.update(console.Group(*panels), refresh=True)
            time.sleep(pause)
            yield step


def is_terminal() -> bool:
    """Return True if the output is a terminal and rich is there to draw in it."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default="This is the dog")
    parser.add_argument("--characters", type=int, default=100, help="how many to write")
    parser.add_argument("--steps", type=int, default=200, help="of the training")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each character in a terminal")
    parser.add_argument("--plain", action="store_true", help="print a line for each character, in a terminal too")
    arguments = parser.parse_args()
    if unknown := set(arguments.prompt) - set(CHARACTERS):
        parser.error(f"--prompt: the rhyme has no {sorted(unknown)}; its characters are {''.join(CHARACTERS)!r}")
    if not arguments.prompt or len(arguments.prompt) + arguments.characters > CONTEXT:
        parser.error(f"expected a prompt, and at most {CONTEXT} characters with those that are written")

    torch.manual_seed(0)
    model = Decoder()
    print(f"trained to a loss of {train(model, arguments.steps):.3f}")
    model.eval()
    with Client() as client, sessions_of(model, client) as sessions:
        steps = islice(write(model, sessions, arguments.prompt), arguments.characters)
        plain = arguments.plain or not is_terminal()
        began = time.perf_counter()
        written = list(show_plain(steps) if plain else show_live(steps, arguments.pause))
        seconds = time.perf_counter() - began
        held = sum(session.info().bytes for session in sessions)

    text = arguments.prompt + "".join(step.character for step in written)
    start = TEXT.find(arguments.prompt)
    right = sum(a == b for a, b in zip(text, TEXT[start:], strict=False)) - len(arguments.prompt)
    with torch.no_grad():
        local = model(encode(text[:-1])[None])[0, len(arguments.prompt) - 1 :]
    difference = (torch.stack([step.logits for step in written]) - local).abs().max()
    print(f"\n{text}\n")
    print(f"{right} of {len(written)} characters as in the rhyme")
    print(f"{len(written) / seconds:.0f} characters a second; the sessions held {held:,} bytes")
    print(f"logits with sessions and here differ by {difference:.1e}")
    assert difference < 1e-4, "the two are not the same"


if __name__ == "__main__":
    main()
