"""The prompts of Voxtral: sounds in texts, conversations and requests for a transcript, as mistral-common writes them.

The processor that transformers has for Voxtral puts no sounds into texts: it leaves prompts to the package
mistral-common. Source: its tokenizers of the versions 7 to 13.
"""

from typing import Any, Final

import torch
from transformers import ProcessorMixin

BEGIN: Final = "[BEGIN_AUDIO]"
"""The token before a sound."""
TEMPLATE: Final = """\
{{- '<s>' }}
{%- set opened = {'user': '[INST]', 'system': '[SYSTEM_PROMPT]', 'assistant': ''} %}
{%- set closed = {'user': '[/INST]', 'system': '[/SYSTEM_PROMPT]', 'assistant': '</s>'} %}
{%- set now = namespace(role='', text=false) %}
{%- if tools %}{{ raise_exception('it writes no tools') }}{% endif %}
{%- for message in messages %}
  {%- if message.role not in opened or message.tool_calls %}{{ raise_exception('it writes no tools') }}{% endif %}
  {%- if message.role != now.role or message.role == 'system' %}
    {{- closed.get(now.role, '') + opened[message.role] }}
    {%- set now.text = false %}
  {%- endif %}
  {%- set now.role = message.role %}
  {%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content %}
  {%- for part in parts or [] %}
    {{- ('\\n\\n' if now.text else '') + part.text if part.type == 'text' else '[AUDIO]' }}
    {%- set now.text = part.type == 'text' %}
  {%- endfor %}
{%- endfor %}
{{- closed.get(now.role, '') }}"""
"""Texts that follow each other in turns of one role are divided by an empty line."""


class VoxtralPrompts(ProcessorMixin):
    """Puts sounds into texts: each is as many tokens as its windows have, behind one with which it begins."""

    def __init__(self, feature_extractor: Any, tokenizer: Any, config: Any) -> None:
        """``config``: the model's. Raises ValueError for a tokenizer without the tokens of sounds."""
        template = tokenizer.chat_template or TEMPLATE
        super().__init__(feature_extractor, tokenizer, chat_template=template)  # type: ignore[no-untyped-call]
        self.audio_token_id = int(config.audio_token_id)
        self.audio_token: str = tokenizer.convert_ids_to_tokens(self.audio_token_id)
        if tokenizer.convert_tokens_to_ids(BEGIN) in {None, tokenizer.unk_token_id}:
            raise ValueError(f"its tokenizer has no token {BEGIN}")
        tower = config.audio_config
        self._tokens = int(tower.max_source_positions * tower.hidden_size // tower.intermediate_size)
        """The tokens of a window."""
        seconds = feature_extractor.n_samples / feature_extractor.sampling_rate
        self.max_audio_len = config.text_config.max_position_embeddings // self._tokens * seconds
        """Seconds of a sound whose tokens the model has positions for."""

    def _process_audio(self, audio: Any, **_: Any) -> tuple[dict[str, Any], list[str]]:
        """The features of sounds, a row for each window, and the text in the place of each sound."""
        extractor, windows = self.feature_extractor, []
        for samples in audio:
            # Features are of the whole sound: their scale is that of its loudest part.
            (features,) = extractor(
                samples, sampling_rate=extractor.sampling_rate, padding=True, truncation=False,
                pad_to_multiple_of=extractor.n_samples, return_tensors="pt",
            )["input_features"]  # fmt: skip
            windows.append(torch.stack(features.split(extractor.nb_max_frames, -1)))
        texts = [BEGIN + self.audio_token * (len(window) * self._tokens) for window in windows]
        return {"input_features": torch.cat(windows)}, texts

    def transcription_prompt(self, language: str | None) -> str:
        """The prompt of a transcript. ``language``: two letters; None to have the model hear it."""
        return f"<s>[INST]{self.audio_token}[/INST]{'' if language is None else f'lang:{language}'}[TRANSCRIBE]"
