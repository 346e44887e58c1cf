"""Quantized weights of safetensors files as the float matrices that they stand for.

A form says which tensors of a file make one weight, and how. What is computed afterwards is of float numbers, so that
edits, gradients and shared passes are as of any other model; activations are not rounded, whatever the form says.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from attention_service.modules.checkpoints.forms.form import Form, FormReader, Stored
from attention_service.modules.checkpoints.forms.quantized.awq import awq
from attention_service.modules.checkpoints.forms.quantized.bitsandbytes import bitsandbytes
from attention_service.modules.checkpoints.forms.quantized.compressed_tensors import compressed
from attention_service.modules.checkpoints.forms.quantized.fp8 import fp8
from attention_service.modules.checkpoints.forms.quantized.gptq import gptq
from attention_service.modules.checkpoints.forms.quantized.mlx import mlx
from attention_service.modules.checkpoints.forms.quantized.quantized_form import QuantizedForm
from attention_service.modules.checkpoints.forms.quantized.torchao import torchao
from attention_service.modules.checkpoints.forms.safetensors_form import safetensors

QUANTIZATION: Final = "quantization_config", "quantization"
"""Names of the entry; the second is MLX's."""
_FORMS: Final[Mapping[str, Callable[[Mapping[str, Any]], QuantizedForm | str]]] = {
    "compressed-tensors": compressed, "fp8": fp8, "gptq": gptq, "awq": awq, "bitsandbytes": bitsandbytes,
    "torchao": torchao, "mlx": mlx,
}  # fmt: skip
"""Each ``quant_method`` that is read. MLX's files have none."""
_CACHE_SCHEMES: Final = "kv_cache_scheme", "kv_cache_quant_algo"
"""Entries that say how the keys and values of a cache are rounded, of compressed-tensors and of modelopt."""
_QUANTIZERS: Final = {
    "aqlm": "aqlm", "auto-round": "auto_round", "bitnet": "accelerate", "fbgemm_fp8": "fbgemm_gpu",
    "fp_quant": "fp_quant", "higgs": "flute", "hqq": "hqq", "mxfp4": "accelerate", "mxfp8": "accelerate",
    "quanto": "optimum", "quark": "quark", "spqr": "spqr_quant", "vptq": "vptq",
}  # fmt: skip
"""The package without which transformers refuses a ``quant_method`` that is not unpacked here.

Source: its ``quantizers``.
"""
_SPARED: Final = re.compile(r"[\w.-]*(\*[\w.-]*){0,2}")
"""Names of modules for which transformers looks by Python's expressions: what takes no time that grows fast."""
_UNQUANTIZED: Final = "take the checkpoint before quantization"


def _quantized(stored: Stored) -> Form | None:
    """The form of files whose config quantizes their weights, or the cache alone."""
    stated, scheme = quantization_of(stored.config), cache_scheme(stored.config)
    if stated is None and scheme is None:
        return None
    left_out = () if scheme is None else (f"quantization_config (the cache is not rounded here: {scheme})",)
    form = form_of(stated) if isinstance(stated, Mapping) else "quantization_config is no object"
    if isinstance(form, str):
        refusal = None if stated is None else _refusal(stated, form)
        return replace(safetensors(stored), left_out=left_out, refusal=refusal)
    return form.form(stored, left_out)


def quantization_of(config: Mapping[str, Any]) -> Any:
    """The entry of a config, or of its part for text, that says how weights are quantized; None without one.

    One that quantizes the cache alone says nothing of weights (``cache_scheme``).
    """
    return next((stated for stated in _stated(config) if _cache_alone(stated) is None), None)


def cache_scheme(config: Mapping[str, Any]) -> str | None:
    """The entry by which a config quantizes the cache alone, as text; None if it does not."""
    schemes = (_cache_alone(stated) for stated in _stated(config))
    return next((scheme for scheme in schemes if scheme is not None), None)


def form_of(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    bits = [stated.get(f"{own}load_in_{count}bit") for own in ("", "_") for count in (4, 8)]
    otherwise = "bitsandbytes" if any(bits) else "mlx" if {"group_size", "bits"} <= stated.keys() else None
    method = stated.get("quant_method") or otherwise
    read = _FORMS.get(str(method))
    return f"{str(method)[:80]} is none of {', '.join(_FORMS)}" if read is None else read(stated)


def _stated(config: Mapping[str, Any]) -> list[Any]:
    """The entries of a config, and of its part for text, about quantization."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return [part[entry] for part in parts for entry in QUANTIZATION if part.get(entry)]


def _cache_alone(stated: Any) -> str | None:
    """The scheme of the cache, if an entry says that no weight is quantized."""
    if not isinstance(stated, Mapping):
        return None
    inner = stated.get("quantization")  # as modelopt writes hf_quant_config.json
    own = inner if isinstance(inner, Mapping) else stated
    method = stated.get("quant_method")
    if method == "compressed-tensors":
        sparsity = stated.get("sparsity_config") or {}
        dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
        plain = stated.get("config_groups") == {} and dense
    elif method == "modelopt":
        plain = own.get("quant_algo") is None and not own.get("config_groups") and not own.get("quantized_layers")
    else:
        return None
    scheme = next(((name, own[name]) for name in _CACHE_SCHEMES if own.get(name)), None)
    return f"{scheme[0]} {_words(scheme[1])}" if plain and scheme is not None else None


def _words(scheme: Any) -> str:
    """A scheme in short: ``FP8``, or ``float of 8 bits``."""
    if isinstance(scheme, Mapping):
        return f"{str(scheme.get('type'))[:40]} of {str(scheme.get('num_bits'))[:40]} bits"
    return str(scheme)[:40]


def _refusal(stated: Any, reason: str) -> str | None:
    """The reason for which a model of a form that is not read is refused, unless transformers reads it."""
    method = str(stated.get("quant_method") if isinstance(stated, Mapping) else None)[:80]
    package = _QUANTIZERS.get(method)
    if package is not None and find_spec(package) is not None and isinstance(stated, Mapping):
        return _spared_by_expression(stated)
    needed = "" if package is None else f"; transformers needs {package} for it, which is not installed"
    return f"it is quantized in a way that this server does not read: {reason}{needed}; {_UNQUANTIZED}"


def _spared_by_expression(stated: Mapping[str, Any]) -> str | None:
    """The reason for which a config is refused that transformers matches by expressions, which may never end."""
    spared = stated.get("modules_to_not_convert") or []
    if not isinstance(spared, list) or not all(isinstance(expression, str) for expression in spared):
        return "modules_to_not_convert of its quantization_config is no list of names"
    odd = next((expression for expression in spared if _SPARED.fullmatch(expression) is None), None)
    if odd is None:
        return None
    return (
        f"modules_to_not_convert of its quantization_config has {odd[:80]!r}; expected names of modules, with .* for a "
        "part at most twice"
    )


QUANTIZED: Final = FormReader(_quantized)
