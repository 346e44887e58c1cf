"""Terms of reading a request's tensors, writing a reply's, and transferring either to a device and back."""

from typing import Literal

from attention_service.cost.terms.base import Term, Unit, lg

Form = Literal["list", "base64", "safetensors"]
"""Form of a tensor on the wire: numbers as text, bytes as text, or raw bytes."""
FORMS: tuple[Form, ...] = ("list", "base64", "safetensors")


def reading_terms(form: Form, numbers: int, itemsize: int) -> list[Term]:
    """Terms from the body of a request to its checked tensors with this many numbers in all."""
    return _carried(f"read {form}", form, numbers, itemsize)


def writing_terms(form: Form, numbers: int, itemsize: int) -> list[Term]:
    """Terms from a reply's tensors to its body."""
    return _carried(f"write {form}", form, numbers, itemsize)


def transfer_terms(of_bytes: int) -> list[Term]:
    """Terms of a transfer between the host and a device with memory of its own."""
    return [Term("start transfer", "start", 1), Term("bytes transfer", "link", of_bytes, lg(of_bytes))]


def _carried(name: str, form: Form, numbers: int, itemsize: int) -> list[Term]:
    start = Term(f"start {name}", "start", 1)
    if form == "list":  # text is written and read number by number
        amount = Term(f"elements {name}", "text", numbers, lg(numbers), marks=(f"{8 * itemsize} bits",))
    else:
        unit: Unit = "encoded" if form == "base64" else "byte"
        amount = Term(f"bytes {name}", unit, numbers * itemsize, lg(numbers * itemsize))
    return [start, amount]
