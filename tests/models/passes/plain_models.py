"""Whole models in plain NumPy float64, from their papers: logits ``[L, V]`` of one text by the tensors of a checkpoint.

Notation: L tokens, d the width of states, H heads of width D, G heads of keys and values.
"""

import numpy as np
from scipy.special import erf


class Tensors:
    """The tensors of a checkpoint under a prefix, in float64."""

    def __init__(self, named, prefix=""):
        self._named, self._prefix = named, prefix

    def __getitem__(self, name):
        return self._named[self._prefix + name]

    def __contains__(self, name):
        return self._prefix + name in self._named

    def under(self, prefix):
        return Tensors(self._named, f"{self._prefix}{prefix}.")

    def linear(self, name, x):
        made = x @ self[f"{name}.weight"].T
        return made + self[f"{name}.bias"] if f"{name}.bias" in self else made

    def layer_norm(self, name, x, epsilon):
        centered = x - x.mean(-1, keepdims=True)
        normed = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
        return normed * self[f"{name}.weight"] + self[f"{name}.bias"]

    def rms_norm(self, name, x, epsilon, offset=0.0):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * (offset + self[f"{name}.weight"])


def softmax(x):
    made = np.exp(x - x.max(-1, keepdims=True))
    return made / made.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(x, 0)


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def tanh_gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_head(x, heads):
    """``[L, H·D]`` to ``[H, L, D]``."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def joined(x):
    """``[H, L, D]`` to ``[L, H·D]``."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def causal(length, window=None):
    """True where query i sees key j."""
    behind = np.arange(length)[:, None] - np.arange(length)
    return (behind >= 0) & (behind < (window or length))


def attend(q, k, v, *, scale=None, seen=None, bias=0.0, cap=None):
    """Attention of ``q [H, L, D]`` over ``k, v [G, L, D]``."""
    k, v = (np.repeat(x, len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    scores = scores + bias
    return joined(softmax(scores if seen is None else np.where(seen, scores, -np.inf)) @ v)


def rotated(x, theta, share=1.0):
    """Rotate the halves of the first ``share`` of ``x [H, L, D]`` by the place of each token."""
    width = int(x.shape[-1] * share)
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(0, width, 2) / width)
    first, second, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def llama(tensors, config, ids):
    """Llama (Touvron et al. 2023); Qwen3 too, whose queries and keys are normed by head."""
    heads, groups, theta = config["num_attention_heads"], config["num_key_value_heads"], _theta(config)
    epsilon, body = config["rms_norm_eps"], tensors.under("model")
    x = body["embed_tokens.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        layer = body.under(f"layers.{number}")
        own, normed = layer.under("self_attn"), layer.rms_norm("input_layernorm", x, epsilon)
        q, k = by_head(own.linear("q_proj", normed), heads), by_head(own.linear("k_proj", normed), groups)
        if "q_norm.weight" in own:
            q, k = own.rms_norm("q_norm", q, epsilon), own.rms_norm("k_norm", k, epsilon)
        v = by_head(own.linear("v_proj", normed), groups)
        context = attend(rotated(q, theta), rotated(k, theta), v, seen=causal(len(ids)))
        x = x + own.linear("o_proj", context)
        x = x + _gated(layer.under("mlp"), layer.rms_norm("post_attention_layernorm", x, epsilon), silu)
    return _unembedded(tensors, body, body.rms_norm("norm", x, epsilon))


def gemma2(tensors, config, ids):
    """Gemma 2 (Gemma Team 2024)."""
    heads, groups, theta = config["num_attention_heads"], config["num_key_value_heads"], _theta(config)
    epsilon, body = config["rms_norm_eps"], tensors.under("model")
    x = body["embed_tokens.weight"][ids] * config["hidden_size"] ** 0.5

    def norm(layer, name, x):
        return layer.rms_norm(name, x, epsilon, offset=1.0)

    for number in range(config["num_hidden_layers"]):
        layer = body.under(f"layers.{number}")
        own, normed = layer.under("self_attn"), norm(layer, "input_layernorm", x)
        q, k, v = (
            by_head(own.linear(f"{name}_proj", normed), count)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        sliding = config["layer_types"][number] == "sliding_attention"
        context = attend(
            rotated(q, theta), rotated(k, theta), v, scale=config["query_pre_attn_scalar"] ** -0.5,
            seen=causal(len(ids), config["sliding_window"] if sliding else None), cap=config["attn_logit_softcapping"],
        )  # fmt: skip
        x = x + norm(layer, "post_attention_layernorm", own.linear("o_proj", context))
        made = _gated(layer.under("mlp"), norm(layer, "pre_feedforward_layernorm", x), tanh_gelu)
        x = x + norm(layer, "post_feedforward_layernorm", made)
    logits, cap = _unembedded(tensors, body, norm(body, "norm", x)), config["final_logit_softcapping"]
    return cap * np.tanh(logits / cap)


def gpt2(tensors, config, ids):
    """GPT-2 (Radford et al. 2019); its matrices are ``[in, out]``."""
    body, epsilon = tensors.under("transformer"), config["layer_norm_epsilon"]
    x = body["wte.weight"][ids] + body["wpe.weight"][: len(ids)]

    def product(part, name, x):
        return x @ part[f"{name}.weight"] + part[f"{name}.bias"]

    for number in range(config["n_layer"]):
        layer = body.under(f"h.{number}")
        made = product(layer, "attn.c_attn", layer.layer_norm("ln_1", x, epsilon))
        q, k, v = (by_head(each, config["n_head"]) for each in np.split(made, 3, -1))
        x = x + product(layer, "attn.c_proj", attend(q, k, v, seen=causal(len(ids))))
        inner = tanh_gelu(product(layer, "mlp.c_fc", layer.layer_norm("ln_2", x, epsilon)))
        x = x + product(layer, "mlp.c_proj", inner)
    return body.layer_norm("ln_f", x, epsilon) @ body["wte.weight"].T


def bert(tensors, config, ids):
    """BERT (Devlin et al. 2019) with its head for masked words."""
    body, epsilon, heads = tensors.under("bert"), config["layer_norm_eps"], config["num_attention_heads"]
    table = body.under("embeddings")
    x = table["word_embeddings.weight"][ids] + table["position_embeddings.weight"][: len(ids)]
    x = table.layer_norm("LayerNorm", x + table["token_type_embeddings.weight"][0], epsilon)
    for number in range(config["num_hidden_layers"]):
        layer = body.under(f"encoder.layer.{number}")
        q, k, v = (by_head(layer.linear(f"attention.self.{each}", x), heads) for each in ("query", "key", "value"))
        made = layer.linear("attention.output.dense", attend(q, k, v))
        x = layer.layer_norm("attention.output.LayerNorm", x + made, epsilon)
        made = layer.linear("output.dense", gelu(layer.linear("intermediate.dense", x)))
        x = layer.layer_norm("output.LayerNorm", x + made, epsilon)
    head = tensors.under("cls.predictions")
    x = head.layer_norm("transform.LayerNorm", gelu(head.linear("transform.dense", x)), epsilon)
    return x @ table["word_embeddings.weight"].T + head["bias"]


def t5_encoder(tensors, config, ids):
    """The encoder of T5 (Raffel et al. 2020): its last states ``[L, d]``."""
    body, heads, epsilon = tensors.under("encoder"), config["num_heads"], config["layer_norm_epsilon"]
    x = tensors["shared.weight"][ids]
    far = np.arange(len(ids)) - np.arange(len(ids))[:, None]
    half = config["relative_attention_num_buckets"] // 2
    exact, most = half // 2, config["relative_attention_max_distance"]
    with np.errstate(divide="ignore"):
        logs = exact + (np.log(abs(far) / exact) / np.log(most / exact) * (half - exact)).clip(-1e9, 1e9).astype(int)
    buckets = half * (far > 0) + np.where(abs(far) < exact, abs(far), np.minimum(logs, half - 1))
    bias = body["block.0.layer.0.SelfAttention.relative_attention_bias.weight"][buckets].transpose(2, 0, 1)
    for number in range(config["num_layers"]):
        layer = body.under(f"block.{number}")
        normed, own = layer.rms_norm("layer.0.layer_norm", x, epsilon), layer.under("layer.0.SelfAttention")
        q, k, v = (by_head(own.linear(each, normed), heads) for each in "qkv")
        x = x + own.linear("o", attend(q, k, v, scale=1.0, bias=bias))
        normed, dense = layer.rms_norm("layer.1.layer_norm", x, epsilon), layer.under("layer.1.DenseReluDense")
        x = x + dense.linear("wo", np.maximum(dense.linear("wi", normed), 0))
    return body.rms_norm("final_layer_norm", x, epsilon)


def mamba(tensors, config, ids):
    """Mamba (Gu and Dao 2023), its scan token by token."""
    body, epsilon = tensors.under("backbone"), config["layer_norm_epsilon"]
    x, rank, states = body["embeddings.weight"][ids], config["time_step_rank"], config["state_size"]
    for number in range(config["num_hidden_layers"]):
        layer = body.under(f"layers.{number}")
        mixer = layer.under("mixer")
        inner, gate = np.split(mixer.linear("in_proj", layer.rms_norm("norm", x, epsilon)), 2, -1)
        inner = silu(_convolved(mixer["conv1d.weight"][:, 0], inner) + mixer["conv1d.bias"])
        step, begin, end = np.split(mixer.linear("x_proj", inner), [rank, rank + states], -1)
        step, decay = softplus(mixer.linear("dt_proj", step)), -np.exp(mixer["A_log"])
        state, rows = np.zeros_like(decay), []
        for at in range(len(ids)):
            state = np.exp(step[at][:, None] * decay) * state + (step[at] * inner[at])[:, None] * begin[at]
            rows.append(state @ end[at])
        x = x + mixer.linear("out_proj", (np.stack(rows) + mixer["D"] * inner) * silu(gate))
    return _unembedded(tensors, body, body.rms_norm("norm_f", x, epsilon), "embeddings.weight")


def _convolved(kernel, x):
    """A causal convolution of each channel of ``x [L, C]`` by its row of ``kernel [C, width]``."""
    width = kernel.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return sum(kernel[:, at] * padded[at : at + len(x)] for at in range(width))


def xlstm(tensors, config, ids):
    """xLSTM of matrix memories (Beck et al. 2025, xLSTM 7B), token by token."""
    body, heads, epsilon = tensors.under("backbone"), config["num_heads"], config["norm_eps"]
    x = body["embeddings.weight"][ids]

    def capped(x, cap):
        return cap * np.tanh(x / cap)

    for number in range(config["num_hidden_layers"]):
        layer = body.under(f"blocks.{number}")
        cell, normed = layer.under("mlstm_layer"), layer.rms_norm("norm_mlstm", x, epsilon)
        q, k, v = (by_head(cell.linear(name, normed), heads) for name in "qkv")
        begin, forget = (
            capped(cell.linear(name, normed), config["gate_soft_cap"]).T for name in ("igate_preact", "fgate_preact")
        )
        memory, norm = np.zeros((heads, k.shape[2], v.shape[2])), np.zeros((heads, k.shape[2]))
        most, rows = np.zeros(heads), []
        for at in range(len(ids)):
            fading = -softplus(-forget[:, at])
            former, most = most, np.maximum(fading + most, begin[:, at])
            kept, new = np.exp(fading + former - most)[:, None], np.exp(begin[:, at] - most)[:, None]
            memory = kept[..., None] * memory + (new * k[:, at])[..., None] * v[:, at][:, None]
            norm = kept * norm + new * k[:, at]
            query = q[:, at] * k.shape[2] ** -0.5
            total = np.maximum(abs((norm * query).sum(-1)), np.exp(-most)) + config["eps"]
            rows.append(np.einsum("hkv,hk->hv", memory, query) / total[:, None])
        context = np.stack(rows)  # [L, H, V]
        centered = context - context.mean(-1, keepdims=True)
        context = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
        context = context.reshape(len(ids), -1) * cell["multihead_norm.weight"]
        x = x + cell.linear("out_proj", sigmoid(cell.linear("ogate_preact", normed)) * context)
        dense, normed = layer.under("ffn"), layer.rms_norm("norm_ffn", x, epsilon)
        x = x + dense.linear("proj_down", silu(dense.linear("proj_up_gate", normed)) * dense.linear("proj_up", normed))
    logits = tensors.linear("lm_head", body.rms_norm("out_norm", x, epsilon))
    return capped(logits, config["output_logit_soft_cap"])


def _theta(config):
    return float((config.get("rope_parameters") or config)["rope_theta"])


def _gated(part, x, act):
    return part.linear("down_proj", act(part.linear("gate_proj", x)) * part.linear("up_proj", x))


def _unembedded(tensors, body, x, table="embed_tokens.weight"):
    return x @ (tensors["lm_head.weight"] if "lm_head.weight" in tensors else body[table]).T
