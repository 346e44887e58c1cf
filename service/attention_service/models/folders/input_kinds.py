"""Model types of transformers that read neither tokens nor images, by what they read, and those that are heard.

Source: ``main_input_name`` of their classes in transformers 5.23; a test compares this table with them.
"""

from typing import Final

_AUDIO: Final = """
    audio-spectrogram-transformer audioflamingo3_encoder canary cohere_asr dac data2vec-audio encodec
    fun_asr_nano_encoder gemma3n_audio gemma4_audio glmasr_encoder granite_speech5_ctc granite_speech5_encoder
    higgs_audio_v2_tokenizer hubert lasr_ctc lasr_encoder mimi mimi_decoder mimi_encoder moonshine moonshine_streaming
    moss_transcribe_diarize_audio muse_spark_audio nemotron3_5_asr nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization
    nemotron3_diarization_audio nemotron_asr_streaming nemotron_asr_streaming_encoder neucodec parakeet_ctc
    parakeet_encoder parakeet_rnnt parakeet_tdt pe_audio_encoder pe_audio_video_encoder pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2_audio_encoder qwen3_asr_encoder
    seamless_m4t seamless_m4t_v2 sew sew-d speech-encoder-decoder speech_to_text speecht5 unispeech unispeech-sat
    univnet vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
    voxtral_encoder voxtral_realtime_encoder wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper xcodec xcodec2
"""
_TIME_SERIES: Final = """
    autoformer informer patchtsmixer patchtst time_series_transformer timesfm timesfm2_5
"""
READS: Final = {
    **dict.fromkeys(_AUDIO.split(), "audio"),
    **dict.fromkeys(_TIME_SERIES.split(), "series of numbers"),
    **dict.fromkeys(["pe_video_encoder", "videoprism", "videoprism_vision_model", "vjepa2"], "videos"),
    **dict.fromkeys(["decision_transformer", "pi0"], "states of a robot or a game"),
    "muse_glimmer_assistant": "noise",
    "oneformer": "images with tasks",
    "perceiver": "inputs of several kinds",
    "voxtral_realtime": "audio that is added to their text, token by token",
}
"""The input of each of these types."""
PAIRS: Final = frozenset({"clip", "siglip", "siglip2", "metaclip_2", "chinese_clip", "altclip"})
"""Types of which an encoder of texts and one of images are loaded as a pair."""
HEARD: Final = frozenset({
    "audio-spectrogram-transformer", "data2vec-audio", "hubert", "lasr_ctc", "lasr_encoder", "moonshine",
    "parakeet_ctc", "parakeet_encoder", "unispeech", "unispeech-sat", "voxtral_encoder", "wav2vec2",
    "wav2vec2-conformer", "wavlm", "whisper",
})  # fmt: skip
"""Types whose sounds are read here, of those that read audio."""
HEARD_IN_TEXTS: Final = frozenset({"audioflamingo3", "glmasr", "musicflamingo", "qwen2_audio", "voxtral"})
"""Types that read texts with sounds in them, which are read here."""
