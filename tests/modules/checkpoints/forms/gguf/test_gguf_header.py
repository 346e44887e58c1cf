"""A header of a GGUF file claims no more than the file holds, or the file is refused by its name."""

import pytest
from tests.modules.gguf_bytes import entry, gguf, tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.gguf import gguf_header

SIZES = pytest.importorskip("gguf").GGML_QUANT_SIZES
TYPES = gguf_header._TYPES


def test_the_blocks_of_types_are_those_of_the_package():
    assert {kind: (each.numbers, each.bytes) for kind, each in TYPES.items()} == {kind: SIZES[kind] for kind in TYPES}


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_with_each_byte_of_its_tensors_is_read_and_a_shorter_one_is_refused(tmp_path, kind):
    entries = [tensor("a", kind, (3, 256)), tensor("b", kind, (512,), offset=SIZES[kind][1] * 3 * 256)]
    size = SIZES[kind][1] * 3 * 256 + SIZES[kind][1] * 512 // SIZES[kind][0]
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(tensors=entries, size=size))
    assert gguf_header.read_header(file).tensors == {"a": (TYPES[kind].name, (3, 256)), "b": (TYPES[kind].name, (512,))}
    file.write_bytes(gguf(tensors=entries, size=size - 1))
    with pytest.raises(InvalidCheckpoint, match=r"m\.gguf is not a readable GGUF file: b of shape \[512\] ends beyond"):
        gguf_header.read_header(file)


@pytest.mark.parametrize("kind", [0, 14, 99])
@pytest.mark.parametrize(
    ("shape", "offset"),
    [((2**40, 2**40), 0), ((2**62,) * 4, 0), ((2**64 - 1,), 0), ((2, 2**20), 0), ((256,), 2**63), ((256,), 4096)],
)
def test_a_tensor_beyond_its_file_is_refused(tmp_path, kind, shape, offset):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(tensors=[tensor("a", kind, shape, offset)], size=4096))
    with pytest.raises(InvalidCheckpoint, match=r"GGUF file: a of shape .* beyond the file, which has 4096 bytes"):
        gguf_header.read_header(file)


def test_the_tensors_begin_at_a_multiple_of_the_stated_alignment(tmp_path):
    file = tmp_path / "m.gguf"
    stated = entry("general.alignment", (4, (1024).to_bytes(4, "little")))
    short = gguf(stated, tensors=[tensor("a", 0, (8,))], size=32)
    file.write_bytes(short)
    with pytest.raises(InvalidCheckpoint, match="which has 0 bytes of tensors"):
        gguf_header.read_header(file)
    file.write_bytes(short + bytes(1024 - len(short) + 32))
    assert "a" in gguf_header.read_header(file).tensors
