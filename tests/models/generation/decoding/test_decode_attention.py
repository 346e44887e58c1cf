"""The attention function of passes that generate, and the others that a model attends by."""

from tests.models.small_models import loaded

from attention_service.models.generation.decoding.decode_attention import DecodeAttention


def test_a_function_that_was_not_closed_takes_no_passes_of_another():
    model = loaded("llama")

    def attended():
        return model.model.config._attn_implementation

    first, second = (DecodeAttention(model, model.attention) for _ in range(2))
    try:
        with first.running([]):
            own = attended()
        with second.running([]):
            assert attended() not in {own, model.attention.name}
    finally:
        second.close()
        first.close()
    assert attended() == model.attention.name
