"""The turns of generations that run beside others: prompts are read together, and each text gets its next token."""

from collections.abc import Sequence
from typing import Final

from attention_service.core.cancellation import checkpoint
from attention_service.models.generation.decoding.decoder import Decoder, Step
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.generation.generation import Emit, Generated, RunningGeneration
from attention_service.models.generation.plans.generation_plan import GenerationPlan, GenerationRequest
from attention_service.models.loaded.loaded_model import LoadedModel

_PASS: Final = 64
"""Tokens of a prompt that a pass over fewer of them takes as long as."""


def read_prompts(decoder: Decoder, generations: Sequence[RunningGeneration], most: int) -> dict[int, Exception]:
    """Read prompts, or parts of them, up to so many tokens. Returns the faults by the place of a generation."""
    faults: dict[int, Exception] = {}
    most = _echo_alone(generations, most, faults)
    while most > 0:
        texts: dict[int, RunningText] = {}
        for at, generation in enumerate(generations):
            if generation.unread and not generation.echoes_alone and at not in faults:
                try:
                    texts[at] = generation.within.run(generation.begin_reading)
                except Exception as fault:
                    faults[at] = fault
        if not texts:
            break
        first = generations[next(iter(texts))]
        steps, count = first.within.run(decoder.read_some, list(texts.values()))
        most -= max(_PASS, count)
        for at, text in texts.items():
            for step in steps:
                if step.text is text:
                    try:
                        generations[at].was_read(step)
                    except Exception as fault:
                        faults[at] = fault
    return faults


def _echo_alone(generations: Sequence[RunningGeneration], most: int, faults: dict[int, Exception]) -> int:
    """Answer prompts that get no token, up to so many tokens of them. Returns how many tokens may still be read."""
    for at, generation in enumerate(generations):
        while most > 0 and generation.echoes_alone and generation.unread and at not in faults:
            before = generation.unread
            try:
                generation.within.run(generation.echo_next)
            except Exception as fault:
                faults[at] = fault
            most -= max(_PASS, before - generation.unread)
    return most


def decode(decoder: Decoder, generations: Sequence[RunningGeneration]) -> dict[int, Exception]:
    """Give each text of these generations its next token. Returns the faults by the place of a generation."""
    places: dict[RunningText, int] = {}
    for at, generation in enumerate(generations):
        places |= dict.fromkeys(generation.texts, at)
    steps: dict[int, list[Step]] = {}
    for step in decoder.step([*places]) if places else ():
        steps.setdefault(places[step.text], []).append(step)
    faults: dict[int, Exception] = {}
    for at, own in steps.items():
        try:
            generations[at].take(own)
        except Exception as fault:
            faults[at] = fault
    return faults


def generate(loaded: LoadedModel, request: GenerationRequest, plan: GenerationPlan, emit: Emit) -> Generated:
    """Generate, with nothing beside. Raises Abandoned between two tokens if nobody waits any more."""
    decoder = Decoder(loaded)
    try:
        generation = RunningGeneration(decoder, request, plan, emit)
        while not generation.has_ended:
            checkpoint()
            most = len(plan.rows) * plan.longest
            reads = generation.unread > 0
            faults = read_prompts(decoder, [generation], most) if reads else decode(decoder, [generation])
            for fault in faults.values():
                raise fault
    finally:
        decoder.close()
    return generation.end()
