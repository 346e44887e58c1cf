"""Makes the object code that ``linking`` links: ``python -m attention_contract.lists.building CPU FEATURES FILE``.

In a process of its own: what compiles takes more memory than the code will ever need. It gives way to all others.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types

from attention_contract.lists.layout import AT_ONCE, ENTRIES, LATER_ENTRIES, MOST, SPARE, STATE, WINDOW
from attention_contract.lists.printing import write
from attention_contract.lists.scanning import scan
from attention_contract.tensors import MAX_RANK

_size = types.int64
_bytes, _bits, _words, _integers, _doubles = map(
    types.CPointer, (types.uint8, types.uint32, types.uint64, types.int64, types.float64)
)
_numba: Any = numba
_array = _numba.carray


def _scan(text: Any, size: int, numbers: Any, lists: Any, later: Any, state: Any, counts: Any, found: Any) -> int:
    return scan(
        _array(text, (size,)),
        _array(numbers, (size // 2 + 1,)),
        _array(lists, (MOST, ENTRIES)),
        _array(later, (MOST, LATER_ENTRIES)),
        _array(state, (STATE,)),
        _array(counts, (MAX_RANK,)),
        _array(found, (WINDOW + SPARE,)),
    )


def _write(
    bits: Any, size: int, sizes: Any, rank: int, scales: Any, first: Any, others: Any, powers: Any, text: Any, most: int
) -> int:
    return write(
        _array(bits, (size,)),
        _array(sizes, (rank,)),
        _array(scales, (AT_ONCE,)),
        _array(first, (AT_ONCE,)),
        _array(others, (AT_ONCE,)),
        _array(powers, (AT_ONCE,)),
        _array(text, (most,)),
    )


_ENTRIES: dict[str, tuple[Callable[..., int], Any]] = {
    "scan": (_scan, _size(_bytes, _size, _doubles, _integers, _integers, _integers, _integers, _integers)),
    "write": (
        _write,
        _size(_bits, _size, _integers, _size, _doubles, _integers, _words, _integers, _bytes, _size),
    ),
}
"""What is called from outside, by its name there."""


def object_code(cpu: str, features: str) -> bytes:
    """An object file with the compiled entries, for a processor as LLVM names it and its features."""
    _numba.config.CPU_NAME, _numba.config.CPU_FEATURES = cpu, features
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )
    module = binding.parse_assembly("")
    for name, (function, signature) in _ENTRIES.items():
        made = _numba.cfunc(signature)(function)
        part = binding.parse_assembly(made.inspect_llvm())
        part.get_function(made.native_name).name = name
        module.link_in(part)
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name not in _ENTRIES:
            each.linkage = "internal"
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


if __name__ == "__main__":
    with suppress(AttributeError, OSError):  # there is no such thing on Windows
        os.nice(19)
    Path(sys.argv[3]).write_bytes(object_code(sys.argv[1], sys.argv[2]))
