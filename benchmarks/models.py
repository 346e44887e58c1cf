"""Weights and statistics of every layer of a whole model, beside transformers' own eager pass that returns its weights.

``python -m benchmarks.models --quick`` prints the tables; ``--output benchmarks/results/models.md`` writes them.
"""

import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attention_client import Client
from attention_contract.schemas.model_requests import (
    ModelForwardRequest,
    ModelGradientsRequest,
    ModelWeightsRequest,
    PredictedLogit,
)
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from benchmarks.measure import Case, rows
from benchmarks.page import IN_TURN, fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running

LENGTHS, QUICK = (12, 128, 1024), (12, 128)
POINTS = 64
CONFIG = LlamaConfig(
    vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=2048,
)  # fmt: skip
TEXT = f"""A Llama of 6 layers and 384 features with random parameters, float32, tokens in. The baseline is
`model(…, output_attentions=True)` with eager attention in this process. `weights` returns the weights of every head and
the five default statistics; `forward` the prediction alone; `integrated gradients` of log p of one token, beside the
gradient of a batch of as many points in torch. Over HTTP the model is in a process of its own, and the
reply is a safetensors file that the client reads.

{IN_TURN}"""


def cases(lengths: Sequence[int], folder: Path, threads: int) -> Iterator[Case]:
    """Each question in the process and over HTTP, at each length."""
    torch.set_num_threads(threads)
    eager = _model("eager")
    loaded = LoadedModel("llama", _model("eager"), None, Device.open("cpu"))
    eager.save_pretrained(folder / "models" / "llama")
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(folder / "models")]
    command += ["--threads", str(threads)]
    port = free_port()
    with (
        running([*command, "--port", str(port)], port, "/health/ready", cores_for(2)[0], {}, folder / "log"),
        Client(f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        for length in lengths:
            ids = torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()

            @torch.no_grad()
            def baseline(ids: list[int] = ids) -> object:
                return eager(torch.tensor([ids]), output_attentions=True, use_cache=False)

            def weights(ids: list[int] = ids) -> object:
                return weights_reply(loaded, ModelWeightsRequest(tokens=ids))

            def forward(ids: list[int] = ids) -> object:
                return forward_reply(loaded, ModelForwardRequest(tokens=ids))

            def served(ids: list[int] = ids) -> object:
                return client.models.weights("llama", tokens=ids)

            yield Case(f"weights, {length} tokens", weights, "eager, weights", baseline)
            yield Case(f"weights over HTTP, {length} tokens", served, "eager, weights", baseline)
            yield Case(f"forward, {length} tokens", forward, "eager, weights", baseline)
        yield _integrated(loaded, lengths[0])


def _integrated(loaded: LoadedModel, length: int) -> Case:
    """Integrated gradients of a text, beside one backward pass of torch over a batch of the points."""
    model, ids = _model("sdpa"), [*range(1, length + 1)]
    request = ModelGradientsRequest(tokens=ids, of=PredictedLogit(token=7), by_head=False, integrated=POINTS)
    costs = ModelCosts(loaded)
    embedded = model.get_input_embeddings()(torch.tensor([ids]))
    scales = torch.linspace(1 / POINTS, 1, POINTS)[:, None, None]

    def baseline() -> object:
        points = (embedded * scales).requires_grad_()
        logits = model(inputs_embeds=points, use_cache=False, logits_to_keep=1).logits
        return torch.autograd.grad(logits[:, -1].log_softmax(-1)[:, 7].sum(), points)

    def integrated() -> object:
        gradients = ModelGradients(loaded, request)
        return gradients.reply(costs.memory.points_at_once(gradients.checked, POINTS, 2**33))

    return Case(f"integrated gradients, {POINTS} points, {length} tokens", integrated, "torch, one batch", baseline)


def _model(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation=implementation)
    return made.eval().requires_grad_(False)


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 41)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each computation")
    options = arguments.parse_args()
    count = options.rounds or (fewer(41) if options.quick else 41)
    with TemporaryDirectory() as folder:
        lines = rows(cases(QUICK if options.quick else LENGTHS, Path(folder), options.threads), count)
        publish("Whole models", TEXT, lines, options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
