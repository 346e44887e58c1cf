"""Checkpoints with quantized weights, written number by number as the documents of each format say."""

import json

import torch
from safetensors.torch import load_file, save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny

AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
"""The column of eight that each nibble of a word holds, the lowest first."""
E4M3 = torch.float8_e4m3fn


def words(numbers, bits):
    """Unsigned numbers ``[rows, columns]`` as int32 ``[rows, columns · bits / 32]``, the first in the lowest bits."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each))
    found = torch.zeros(len(numbers), numbers.shape[1] // each, dtype=torch.int64)
    for at in range(each):
        found |= numbers[:, at::each].long() << bits * at
    return (found - (found >= 2**31) * 2**32).to(torch.int32)


def asymmetric(weight, group, bits=4):
    """Unsigned numbers, zero points and scales ``[rows, groups]`` of groups of columns, and the weight they make."""
    parts = weight.view(len(weight), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).to(torch.float16).float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    numbers = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return numbers.view_as(weight), zero, scale, ((numbers - zero[..., None]) * scale[..., None]).view_as(weight)


def fp8(weight):
    """Blocks of 16 rows and 24 columns, of which the last may be smaller."""
    blocks = torch.zeros(-(-weight.shape[0] // 16), -(-weight.shape[1] // 24))
    whole, stored = torch.empty_like(weight), torch.empty(weight.shape, dtype=E4M3)
    for row in range(blocks.shape[0]):
        for column in range(blocks.shape[1]):
            place = slice(16 * row, 16 * row + 16), slice(24 * column, 24 * column + 24)
            scale = weight[place].abs().max() / 448
            blocks[row, column] = scale
            stored[place] = (weight[place] / scale).to(E4M3)
            whole[place] = stored[place].float() * scale
    return {"weight": stored, "weight_scale_inv": blocks, "input_scale": torch.ones(())}, whole


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def packed(weight):
    """compressed-tensors: signed numbers and zero points with 8 added, the latter packed along the rows."""
    numbers, zero, scale, whole = asymmetric(weight, 8)
    stored = {"weight_packed": words(numbers, 4), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return stored | {"weight_zero_point": words(zero.T.contiguous(), 4).T.contiguous()}, whole


def gptq(weight):
    """Columns in another order; zero points are stored less 1."""
    order = torch.arange(weight.shape[1]).flip(0) // 8
    numbers, zero, scale, whole = asymmetric(weight.flip(1), 8)
    stored = {
        "qweight": words(numbers.flip(1), 4).T.contiguous(),
        "qzeros": words(zero.T.contiguous() - 1, 4),
        "scales": scale.T.to(torch.float16).contiguous(),
        "g_idx": order.to(torch.int32),
    }
    return stored, whole.flip(1)


def awq(weight):
    numbers, zero, scale, whole = asymmetric(weight, 8)

    def mixed(x):
        return words(x.T.reshape(x.shape[1], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4)

    return {"qweight": mixed(numbers), "qzeros": mixed(zero), "scales": scale.T.to(torch.float16).contiguous()}, whole


def bnb8(weight):
    scale = weight.abs().amax(1)
    stored = (weight * 127 / scale[:, None]).round().to(torch.int8)
    found = {"weight": stored, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return found, stored.float() * (scale / 127)[:, None]


def nf4(weight):
    """Scales of 16 numbers are numbers of a table, times a scale of four of them, plus an offset."""
    levels, steps = torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 256)
    flat = weight.flatten().view(-1, 16)
    scale = flat.abs().amax(1)
    offset = scale.mean()
    outer = (scale - offset).view(-1, 4).abs().amax(1) + 1e-6
    codes = ((scale - offset) / outer.repeat_interleave(4) + 1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    scale = steps[codes.long()] * outer.repeat_interleave(4) + offset
    numbers = ((flat / scale[:, None] + 1) * 7.5).round().clamp(0, 15).long()
    pairs = numbers.flatten().view(-1, 2)
    state = {
        "quant_type": "nf4", "blocksize": 16, "shape": [*weight.shape], "dtype": "float32", "nested_blocksize": 4,
        "nested_offset": float(offset), "nested_dtype": "float32",
    }  # fmt: skip
    stored = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": codes, "weight.quant_map": levels, "weight.nested_absmax": outer,
        "weight.nested_quant_map": steps,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }  # fmt: skip
    return stored, (levels[numbers] * scale[:, None]).view_as(weight)


def torchao8(weight):
    """Groups of 8 columns, and a scale of what the layer reads."""
    numbers, zero, scale, whole = asymmetric(weight, 8, bits=8)
    before = torch.linspace(0.5, 1.5, weight.shape[1])
    stored = {"_weight_qdata": (numbers - 128).to(torch.int8), "_weight_scale": scale}
    stored |= {"_weight_zero_point": (zero - 128).to(torch.int8), "_weight_act_pre_scale": before}
    return stored, whole * before


def torchao_fp8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(E4M3)
    return {"_weight_qdata": stored, "_weight_scale": scale}, stored.float() * scale


def mlx(weight):
    """Groups of 8 columns from their least number on, eight numbers in each word."""
    parts = weight.view(len(weight), -1, 8)
    low = parts.amin(-1)
    scale = (parts.amax(-1) - low) / 15
    numbers = ((parts - low[..., None]) / scale[..., None]).round().clamp(0, 15)
    whole = numbers * scale[..., None] + low[..., None]
    stored = words(numbers.view_as(weight), 4).view(torch.uint32)
    return {"weight": stored, "scales": scale, "biases": low}, whole.view_as(weight)


def torchao(name, **options):
    """The entry of config.json as transformers writes it."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 2, "_data": options}}}


def _group(**entries):
    return {"group_0": {"targets": ["Linear"], "weights": entries}}


FORMS = {
    "FP8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 24]}),
    "compressed-tensors int8": (int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": _group(num_bits=8, type="int", strategy="channel", symmetric=True), "ignore": ["lm_head"],
    }),
    "compressed-tensors int4": (packed, {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": _group(num_bits=4, type="int", strategy="group", group_size=8, symmetric=False),
    }),
    "GPTQ int4": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True}),
    "AWQ int4": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}),
    "bitsandbytes int8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes NF4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "torchao int8": (torchao8, torchao("Int8WeightOnlyConfig", group_size=None)),
    "torchao FP8": (torchao_fp8, torchao("Float8WeightOnlyConfig")),
    "MLX int4": (mlx, {"group_size": 8, "bits": 4, "mode": "affine"}),
}  # fmt: skip
"""Each form by the words of ``ran.weights``: what writes a weight, and the entry of config.json."""


def write(folder, label):
    """Write a small Llama with quantized layers, and return the same model with the numbers that they stand for."""
    store, entry = FORMS[label]
    model = tiny("llama")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    state, tensors = model.state_dict(), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stored, whole = store(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + part: x.contiguous() for part, x in stored.items()}
        state[name] = whole
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    model.load_state_dict(state)
    return model
