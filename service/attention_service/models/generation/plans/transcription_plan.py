"""The plan of a transcription: its sound, language, prompt, layers and alignment heads, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.plans.generation_plan import GenerationPlan, Heard, HeardPrompt, looking_plan
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.sounds.sound_decoding import decoded
from attention_service.models.inputs.sounds.sound_windows import OVERLAP, SoundWindow, cut
from attention_service.models.inputs.sounds.spoken_languages import language_code, language_name
from attention_service.models.inputs.sounds.time_tokens import TimeTokens, time_tokens_of
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_transformers.model_layers import LayerKey

_MEDIAN: Final = 7
"""Frames over which weights are smoothed for the times of words, if the config names no number."""
_WIDTH: Final = "median_filter_width"
_POSITIONS: Final = 4096
"""Tokens of a transcript, of a decoder that does not say how many it has positions for."""
_MIN_TRANSCRIPT_TOKENS: Final = 256
"""Tokens that the transcript of a short sound may have; of a longer one, as many as the sound itself."""
_BEFORE_TIMES: Final = 2
"""Tokens from that of silence to the first one of a time. Source: the tokenizers of Whisper."""
_FIRST_TOKENS: Final = 8
"""Tokens of a language, a task and the like before a text, at most."""
_LETTERS: Final = 2
_NO_LANGUAGES: Final = "the model has no tokens of languages; leave it out"
_NO_PROMPT: Final = "the model takes no text before its own; leave it out"


def plan_transcription(loaded: LoadedModel, request: TranscriptionRequest) -> GenerationPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    model, reader = loaded.model, loaded.reader
    if not reader.transcribes or not model.can_generate():
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
    if decodes := reader.pairs:
        settings = _settings(model.generation_config, reader, request)
    else:
        code = _code(reader, request)
    with fields_named(**{"audio.0": "file"}):
        windows = _windows(reader, request)
        if request.growing is not None and len(windows) > 1:
            raise InvalidRequest.at(
                "audio.0",
                f"with growing, it has at most {reader.hears_s:g} s; begin a new one where its text has come to",
                limit=reader.hears_s,
            )
        read = partial(_prompt, reader, code, request.prompt)
        first = read(windows[0])
    accepted = _accepted(reader, request)
    if decodes:
        most = (reader.max_length or _POSITIONS) - 1
        length = getattr(model.generation_config, "max_length", None)
        new_tokens = min(length, most) if isinstance(length, int) else most
    else:
        new_tokens = max(_MIN_TRANSCRIPT_TOKENS, sum(part is not None for part in first.seconds))
        count = len(first.ids) + len(accepted)
        if reader.max_length is not None and (new_tokens := min(new_tokens, reader.max_length - count)) < 1:
            raise InvalidRequest.at(
                "file", f"with it the prompt has {count} tokens, and the model positions for {reader.max_length}"
            )
    # OpenAI's requests for texts have the same settings of draws.
    drawn = CompletionRequest(
        model=request.model, prompt=" ", temperature=request.temperature or 0.0, top_p=1.0,
        logprobs=0 if request.include or request.tells_segments else None,
    )  # fmt: skip
    sampling = replace(Sampling.of(drawn, new_tokens, model.generation_config), new_tokens=new_tokens, stops=())
    times = _times(model.generation_config, first) if decodes and request.tells_segments else None
    if times is not None:
        settings |= {"return_timestamps": True, "eos_token_id": reader.end_ids(model)[0]}  # it takes no list there
    heard = Heard(
        settings, _heads(loaded, request), windows, first, read, int(getattr(model.config, _WIDTH, _MEDIAN)),
        None if code is None else language_name(code), times, None if times is None else times.first - _BEFORE_TIMES,
        accepted, 0 if request.growing is None else request.growing.frames,
    )  # fmt: skip
    return looking_plan(
        loaded, request.attention, [first.ids], sampling, alone=bool(request.alone) or not decodes, vision=first.media,
        arguments=first.arguments, heard=heard,
    )  # fmt: skip


def _accepted(reader: InputReader, request: TranscriptionRequest) -> list[int]:
    """The tokens that a text begins with. Raises InvalidRequest."""
    accepted = [] if request.growing is None else request.growing.accepted
    most = (reader.max_length or _POSITIONS) // 2 - _FIRST_TOKENS
    if len(accepted) > most:
        raise InvalidRequest.at(
            "growing.accepted", f"{len(accepted)} tokens; the model takes {most}. Begin a new sound", limit=most
        )
    for index, token in enumerate(accepted):
        if token >= reader.predictable or reader.decoder.is_special(token):
            raise InvalidRequest.at(f"growing.accepted.{index}", f"{token} is no token of a text")
    return accepted


def _windows(reader: InputReader, request: TranscriptionRequest) -> list[SoundWindow]:
    """The windows of a sound that the model hears one after the other. Raises InvalidRequest."""
    (sound,) = decoded([request.file], reader.rate)
    if (most := reader.hears_s) is None:
        if request.overlap is not None:
            raise InvalidRequest.at("overlap", "the model hears a sound of any length at once; leave it out")
        return cut(sound, reader.rate, None, 0.0)
    overlap = most * OVERLAP if request.overlap is None else request.overlap
    if overlap > most / 2:
        raise InvalidRequest.at(
            "overlap", f"expected at most {most / 2:g} s, half of what the model hears at a time; got {overlap:g}",
            limit=most / 2,
        )  # fmt: skip
    return cut(sound, reader.rate, most, overlap)


def _prompt(reader: InputReader, code: str | None, instruction: str | None, window: SoundWindow) -> HeardPrompt:
    """The input of a model for a window of a sound. Raises InvalidRequest."""
    inputs = reader.to_transcribe(window.sound, code, instruction)
    ids: list[int] = inputs.text.host_ids[0].tolist()
    parts = [] if inputs.text.seconds is None else inputs.text.seconds[0]
    seconds = [
        None if part is None else (round(part[0] + window.begin, 6), round(part[1] + window.begin, 6)) for part in parts
    ]
    left_out = set() if reader.pairs else {"input_ids", "attention_mask"}
    arguments = {name: x for name, x in inputs.arguments.items() if name not in left_out}
    return HeardPrompt(ids, arguments, seconds, inputs.media)


def _times(generation: Any, prompt: HeardPrompt) -> TimeTokens | None:
    """The tokens of times of a model, a step of which is a frame."""
    begin, end = prompt.seconds[0] or (0.0, 0.0)
    return time_tokens_of(generation, end - begin)


def _settings(generation: Any, reader: InputReader, request: TranscriptionRequest) -> dict[str, Any]:
    """The arguments of ``generate`` for language and prompt. Raises InvalidRequest."""
    settings: dict[str, Any] = {}
    languages: Mapping[str, int] = getattr(generation, "lang_to_id", None) or {}
    languages = languages if getattr(generation, "is_multilingual", True) else {}
    if request.language is not None and languages:
        token = f"<|{language_code(request.language)}|>"
        if token not in languages:
            known = ", ".join(spoken.strip("<|>") for spoken in [*languages][:8])
            raise InvalidRequest.at("language", f"{request.language!r} is not one of the model's: {known}, …")
        settings["language"] = token
    elif request.language not in {None, "en", "english"}:
        raise InvalidRequest.at("language", _NO_LANGUAGES)
    if languages and getattr(generation, "task_to_id", None):
        settings["task"] = "transcribe"
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
        settings["prompt_ids"] = ids
    return settings


def _code(reader: InputReader, request: TranscriptionRequest) -> str | None:
    """The two letters of the language that a prompt names, if it names one. Raises InvalidRequest."""
    name = None if request.language is None else request.language.lower()
    if not reader.names_language:
        if name not in {None, "en", "english"}:
            raise InvalidRequest.at("language", _NO_LANGUAGES)
        return None
    if request.prompt is not None:
        raise InvalidRequest.at("prompt", _NO_PROMPT)
    code = None if name is None else language_code(name)
    if code is not None and (len(code) != _LETTERS or language_name(code) is None):
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
    heads: dict[LayerKey, list[int]] = {}
    for index, (layer, head) in enumerate(given):
        if head >= cross.get(key := f"{before}{layer}", 0):
            raise InvalidRequest.at(
                f"alignment_heads.{index}",
                f"expected a layer of {len(cross)} and one of its heads; got {[layer, head]}",
            )
        heads.setdefault(loaded.places[key].key, []).append(head)
    return dict(heads)


def language_token(generation: Any, tokens: Sequence[int]) -> str | None:
    """The token of a language among the first of a text, as ``<|de|>``; None if there is none."""
    names = {number: token for token, number in (getattr(generation, "lang_to_id", None) or {}).items()}
    return next((names[token] for token in tokens if token in names), None)


def silence_of(heard: Heard, model: Any, tokens: Sequence[int]) -> tuple[int, int] | None:
    """The position among the first tokens of a text that predicts silence, and its token, if that is asked for."""
    start = model.generation_config.decoder_start_token_id
    if heard.silence is None or start not in tokens:
        return None
    return len(tokens) - 1 - [*reversed(tokens)].index(start), heard.silence
