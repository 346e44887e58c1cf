"""Tokens that a model generates for several prompts at once, beside those of transformers for each alone."""

import copy
from typing import Any, Final

import orjson
import torch
from transformers import GenerationConfig, PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.validation import validate
from attention_contract.wire import to_json
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, generate, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.found import Found, short_error
from tools.models_walk.joined import joined
from tools.models_walk.model_types import built

PROMPTS: Final = [[3, 4, 5], [8, 3, 7, 9, 10], [6]]
NEW: Final = 6
SAMPLED: Final = {"temperature": 0.7, "top_p": 0.9, "seed": 5}


def generated_tokens(found: Found, model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Compare greedy and drawn tokens."""
    if not model.can_generate() or isinstance(loaded.reader, SoundInputs):
        return
    model.generation_config = GenerationConfig(
        **{name: getattr(model.generation_config, name) for name in ("decoder_start_token_id",)},
        pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    loaded.model.generation_config = copy.deepcopy(model.generation_config)
    fresh = built(found.kind).to(model.device)
    fresh.generation_config = copy.deepcopy(model.generation_config)
    # One that has run attends otherwise in bigbird_pegasus, and keeps the state of its last text in recurrent_gemma.
    try:
        tokens = _tokens if loaded.places else _tokens_alone
        tokens(loaded, SAMPLED)
    except InvalidRequest as fault:
        found.reasons["generate"] = short_error(fault)
        tokens = _tokens_alone
    found.generated = all(
        tokens(loaded, options) in (_own_tokens(each, loaded, options) for each in (model, fresh))
        for options in ({"temperature": 0}, SAMPLED)
    )
    if not found.generated:
        found.reasons["generate"] = "other tokens"


def joined_texts(found: Found, _: PreTrainedModel, loaded: LoadedModel) -> None:
    """Compare texts that share passes with the same alone."""
    if found.generated is None:
        return
    shared = joined(loaded, NEW)
    found.joined, found.apart = shared.kind, shared.differ
    if shared.reason is not None:
        found.reasons["joined"] = shared.reason
    if not shared.tokens:
        found.reasons["joined"] = "other tokens"


def _tokens(loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    fields = {"model": loaded.name, "prompt": PROMPTS, "max_tokens": NEW, "attention": {"top_k": 1}, **options}
    request = validate(CompletionRequest, fields)
    (ended,) = generate(loaded, request, plan_generation(loaded, request), lambda _: None).last
    choices = validate(Completion, orjson.loads(to_json(ended))).choices
    return [[token.id for token in choice.attention] for choice in choices]


def _tokens_alone(loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    """The same of a type that tells no weights while it generates."""
    request = validate(CompletionRequest, {"model": loaded.name, "prompt": PROMPTS, "max_tokens": NEW, **options})
    plan = plan_generation(loaded, request)
    decoder = Decoder(loaded)
    generation = RunningGeneration(decoder, request, plan, lambda _: None)
    texts: dict[int, RunningText] = {}
    while not generation.has_ended:
        for fault in (read_prompts(decoder, [generation], 100) or decode(decoder, [generation])).values():
            raise fault
        texts |= {text.choice: text for text in generation.texts}
    return [text.ids[len(PROMPTS[choice]) :] for choice, text in sorted(texts.items())]


def _own_tokens(model: PreTrainedModel, loaded: LoadedModel, options: dict[str, Any]) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone; choice i is drawn after the seed + i."""
    drawn = options["temperature"] > 0
    sampling = {name: options[name] for name in ("temperature", "top_p") if drawn} | ({"top_k": 0} if drawn else {})
    found = []
    for choice, prompt in enumerate(PROMPTS):
        given = torch.tensor([prompt], device=model.device)
        torch.manual_seed(options.get("seed", 0) + choice)
        with torch.no_grad():
            tokens: Any = copy.deepcopy(model).generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, num_beams=1, do_sample=drawn,
                **sampling,
            )  # fmt: skip
        row = tokens[0, 1 if loaded.reader.pairs else len(prompt) :].tolist()
        found.append(row[: row.index(2) + 1] if 2 in row else row)
    return found
