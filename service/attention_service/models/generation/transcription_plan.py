"""The plan of a transcription: its sound, language, prompt, layers and alignment heads, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_service.models.generation.generation_plan import GenerationPlan, Heard, looking_plan
from attention_service.models.generation.sampling import Sampling
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.inputs.sounds.sound_prompts import SoundPrompts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_transformers.model_layers import LayerKey

_MEDIAN: Final = 7
"""Frames over which weights are smoothed for the times of words, if the config names no number."""
_WIDTH: Final = "median_filter_width"
_POSITIONS: Final = 4096
"""Tokens of a transcript, of a decoder that does not say how many it has positions for."""
_TOKENS: Final = 256
"""Tokens that the transcript of a short sound may have; of a longer one, as many as the sound itself."""
_LETTERS: Final = 2
_NO_LANGUAGES: Final = "the model has no tokens of languages; leave it out"
_NO_PROMPT: Final = "the model takes no text before its own; leave it out"


def plan_transcription(loaded: LoadedModel, request: TranscriptionRequest) -> GenerationPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    model, reader = loaded.model, loaded.reader
    decodes = isinstance(reader, SoundInputs) and reader.pairs
    if not (decodes or (isinstance(reader, SoundPrompts) and reader.transcribes)) or not model.can_generate():
        raise InvalidRequest.at(
            "model", f"{type(model).__name__} writes down no sounds; take Whisper, Moonshine, Voxtral or Audio Flamingo"
        )
    if reader.tokenizer is None:
        raise InvalidRequest.at("model", f"{reader.no_tokenizer}, so its tokens have no text")
    if request.attention is not None and request.attention.keep:
        raise InvalidRequest.at(
            "attention.keep", "a transcription is not recorded; ask forward with its text as target"
        )
    settings: dict[str, Any] = {}
    code = None
    if isinstance(reader, SoundPrompts):
        code = _code(reader, request)
    elif isinstance(reader, SoundInputs):
        settings = _settings(model.generation_config, reader, request)
    try:
        if isinstance(reader, SoundPrompts):
            inputs = reader.to_transcribe(request.file, code, request.prompt)
        else:
            inputs = reader.read(ModelForwardRequest(audio=[request.file]))
    except InvalidRequest as fault:
        raise InvalidRequest(fault.detail.replace("audio.0", "file"), param="file", **fault.facts) from None
    ids: list[int] = inputs.text.host_ids[0].tolist()
    seconds = [] if inputs.text.seconds is None else inputs.text.seconds[0]
    if decodes:
        most = (reader.max_length or _POSITIONS) - 1
        length = getattr(model.generation_config, "max_length", None)
        new_tokens = min(length, most) if isinstance(length, int) else most
    else:
        new_tokens = max(_TOKENS, sum(each is not None for each in seconds))
        if reader.max_length is not None and (new_tokens := min(new_tokens, reader.max_length - len(ids))) < 1:
            raise InvalidRequest.at(
                "file", f"with it the prompt has {len(ids)} tokens, and the model positions for {reader.max_length}"
            )
    # OpenAI's requests for texts have the same settings of draws.
    drawn = CompletionRequest(
        model=request.model, prompt=" ", temperature=request.temperature or 0.0, top_p=1.0,
        logprobs=0 if request.include else None,
    )  # fmt: skip
    sampling = replace(Sampling.of(drawn, new_tokens, model.generation_config), new_tokens=new_tokens, stops=())
    width = int(getattr(model.config, _WIDTH, _MEDIAN))
    return looking_plan(
        loaded, request.attention, [ids], sampling, alone=True, vision=inputs.media,
        arguments={
            name: x for name, x in inputs.arguments.items()
            if name != "decoder_input_ids" and (decodes or name not in {"input_ids", "attention_mask"})
        },
        heard=Heard(settings, _heads(loaded, request), seconds, width, None if code is None else LANGUAGES[code]),
    )  # fmt: skip


def _settings(generation: Any, reader: SoundInputs, request: TranscriptionRequest) -> dict[str, Any]:
    """The arguments of ``generate`` for language and prompt. Raises InvalidRequest."""
    found: dict[str, Any] = {}
    languages: Mapping[str, int] = getattr(generation, "lang_to_id", None) or {}
    languages = languages if getattr(generation, "is_multilingual", True) else {}
    if request.language is not None and languages:
        name = request.language.lower()
        token = f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"
        if token not in languages:
            known = ", ".join(each.strip("<|>") for each in [*languages][:8])
            raise InvalidRequest.at("language", f"{request.language!r} is not one of the model's: {known}, …")
        found["language"] = token
    elif request.language not in {None, "en", "english"}:
        raise InvalidRequest.at("language", _NO_LANGUAGES)
    if languages and getattr(generation, "task_to_id", None):
        found["task"] = "transcribe"
    if request.prompt is not None:
        prompt_ids = getattr(reader.tokenizer, "get_prompt_ids", None)
        if prompt_ids is None:
            raise InvalidRequest.at("prompt", _NO_PROMPT)
        try:
            ids = torch.as_tensor(prompt_ids(request.prompt, return_tensors="pt"))
        except ValueError as fault:
            raise InvalidRequest.at("prompt", str(fault)[:200]) from None
        if (most := (reader.max_length or 448) // 2 - 1) < len(ids):
            raise InvalidRequest.at("prompt", f"it has {len(ids)} tokens; the model takes {most}", limit=most)
        found["prompt_ids"] = ids
    return found


def _code(reader: SoundPrompts, request: TranscriptionRequest) -> str | None:
    """The two letters of the language that a prompt names, if it names one. Raises InvalidRequest."""
    name = None if request.language is None else request.language.lower()
    if not reader.names_language:
        if name not in {None, "en", "english"}:
            raise InvalidRequest.at("language", _NO_LANGUAGES)
        return None
    if request.prompt is not None:
        raise InvalidRequest.at("prompt", _NO_PROMPT)
    code = None if name is None else TO_LANGUAGE_CODE.get(name, name)
    if code is not None and (len(code) != _LETTERS or code not in LANGUAGES):
        raise InvalidRequest.at("language", f"{request.language!r} is no language of two letters, as en or english")
    return code


def _heads(loaded: LoadedModel, request: TranscriptionRequest) -> dict[LayerKey, Sequence[int]]:
    """The alignment heads of each layer whose keys are of the sound. Raises InvalidRequest."""
    before = "cross." if loaded.reader.pairs else ""
    cross = {
        key: place.widths.heads for key, place in loaded.places.items()
        if (key.startswith(before) if before else place.queries == "text")
    }  # fmt: skip
    own = getattr(loaded.model.generation_config, "alignment_heads", None)
    if not (given := request.alignment_heads or own):
        later = [*cross][len(cross) // 2 :]
        return {loaded.places[key].key: [*range(cross[key])] for key in later}
    found: dict[LayerKey, list[int]] = {}
    for index, (layer, head) in enumerate(given):
        if head >= cross.get(key := f"{before}{layer}", 0):
            raise InvalidRequest.at(
                f"alignment_heads.{index}",
                f"expected a layer of {len(cross)} and one of its heads; got {[layer, head]}",
            )
        found.setdefault(loaded.places[key].key, []).append(head)
    return dict(found)


def language_of(generation: Any, tokens: Sequence[int]) -> str | None:
    """The language, in English, whose token is among the first of a text; None if there is none."""
    names = {number: token for token, number in (getattr(generation, "lang_to_id", None) or {}).items()}
    code = next((names[each].strip("<|>") for each in tokens if each in names), None)
    return None if code is None else LANGUAGES.get(code, code)
