"""Whatever a checkpoint's tokenizer raises for a text blames the text's field; the end of the process goes on."""

import pytest

from attention_contract.errors import InvalidRequest
from attention_service.models.inputs.tokenizer_faults import is_fault, tokenizer_faults

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""A class like that of panics in Rust, which is no Exception."""


@pytest.mark.parametrize("fault", [Exception("WordLevel error: Missing [UNK] token"), PANIC("index out of bounds")])
def test_errors_and_panics_of_a_tokenizer_name_the_field(fault):
    with pytest.raises(InvalidRequest, match="tokenizer cannot read it") as caught, tokenizer_faults("text"):
        raise fault
    assert caught.value.param == "text"
    assert str(fault) in caught.value.detail


@pytest.mark.parametrize("fault", [SystemExit(1), InvalidRequest.at("tokens", "too many")])
def test_others_pass_as_they_are(fault):
    with pytest.raises(type(fault)) as caught, tokenizer_faults("text"):
        raise fault
    assert caught.value is fault


@pytest.mark.parametrize(
    ("fault", "caught"), [(Exception(), True), (PANIC(), True), (SystemExit(1), False), (KeyboardInterrupt(), False)]
)
def test_a_panic_is_a_fault_and_the_end_of_a_program_is_none(fault, caught):
    assert is_fault(fault) == caught
