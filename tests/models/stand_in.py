"""The process of a model without transformers: its answers show what it was asked, and it does what its text says."""

import os
import time
from contextlib import nullcontext
from tempfile import TemporaryFile

import numpy as np
import torch

from attention_contract.errors import Stuck
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, ModelComplexityRequest, PassCost
from attention_contract.schemas.model_requests import LayerTaps, ModelForwardReply, ModelForwardRequest
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile
from attention_contract.wire import JSON, from_body
from attention_service.core.cancellation import checkpoint
from attention_service.core.tensors import empty_result
from attention_service.models.process import served, turns

MIB = 2**20


class StandIn:
    """A model whose commands are texts: ``sleep 1``, ``compute 1``, ``stubborn 1``, ``take 100``, ``map 100``, ``die``,
    ``fail``, ``print``.

    After ``hold 100`` it says that it holds 100 MiB of a GPU, which ``lose`` loses. ``needs 20 large 4`` is estimated
    at 20 MiB and answers with a tensor of 4 MiB, which is made where results are. A generation of ``5 100`` emits five
    events of 100 bytes.
    """

    def __init__(self, facts):
        self.facts = facts
        self.kept = []
        self.held = None

    def info(self):
        layer = {"layer": 0, "heads": 1, "kv_heads": 1}
        facts = {name: self.facts[name] for name in ("dtype", "device")}
        return facts | {"layers": [layer], "takes": ["text"], "max_length": self.facts["free_bytes"]}

    def held_bytes(self):
        return self.held

    def adapter_bytes(self):
        return {}

    def turn(self, *, spares_core):
        return nullcontext()

    def recover(self, fault):
        if str(fault) == "lost":
            raise Stuck("the device computes nothing any more")

    def prepare(self, operation, body, facts, emit):
        assert facts["free_bytes"] > 0
        request = from_body(
            ModelForwardRequest if operation != "complexity" else ModelComplexityRequest, body, JSON, "request"
        )
        text = getattr(request, "text", "")
        need = int(text.split()[1]) * MIB if text.startswith("needs") else 1000
        return served.PricedRun(need, lambda: served.Answer(*getattr(self, operation)(request, emit)))

    def forward(self, request, emit):
        command, _, amount = request.text.partition(" ")
        match command:
            case "sleep":
                until = time.monotonic() + float(amount)
                while time.monotonic() < until:
                    checkpoint()
                    time.sleep(0.01)
            case "stubborn":
                time.sleep(float(amount))
            case "compute":
                until = time.monotonic() + float(amount)
                while time.monotonic() < until:
                    pass
            case "take":
                self.kept.append(np.ones(int(amount) * MIB, np.uint8))
                time.sleep(0.5)
            case "map":
                with TemporaryFile() as file:
                    file.truncate(int(amount) * MIB)
                    np.memmap(file, np.uint8, "r").sum()
                    time.sleep(0.5)
            case "hold":
                self.held = int(amount) * MIB
            case "die":
                os._exit(7)
            case "lose":
                raise RuntimeError("lost")
            case "fail":
                raise ZeroDivisionError(amount)
            case "print":
                print(amount, flush=True)
                os.write(1, b"not a message")
        ran = ModelRan(
            model=self.facts["name"], architecture=str(os.getpid()), device="cpu", dtype="float32", kernels=[],
            compute_ms=1.0, queue_ms=0.0, peak_bytes=0,
        )  # fmt: skip
        labels = TokenLabelsReply(tokens=[request.text], ids=[0], spans=[None])
        tap = LayerTaps(layer=0, q=np.full((1, 1, 1), len(request.text), np.float32))
        if " large " in request.text:
            numbers = int(float(amount.split()[-1]) * MIB) // 4
            made = empty_result((1, 1, numbers), torch.zeros(1)).copy_(torch.arange(numbers))
            tap = LayerTaps(layer=0, q=made.numpy(), k=made.numpy() + 1)
        recording = RecordingFile(**EXAMPLE_RECORDING | {"text": request.text}) if request.keep else None
        return ModelForwardReply(labels=labels, ran=ran, layers=[tap]), recording

    def count(self, request, emit):
        count, _, size = request.text.partition(" ")
        for number in range(int(count)):
            checkpoint()
            emit(str(number).encode().ljust(int(size or 1)))
            time.sleep(0.001)
        return ()

    def complexity(self, request, emit):
        cost = PassCost(flops=1, bytes=1, peak_bytes=1, predicted_ms=1.0, predicted_low_ms=1.0, predicted_high_ms=1.0)
        reply = ModelComplexityReply(
            model="", parameters=1, parameter_bytes=4, prefill=cost, per_token=cost, total_ms=1.0,
            total_low_ms=1.0, total_high_ms=1.0,
            cache_bytes_per_token=1, cache_bytes=1, max_batch=1, max_length=request.length,
        )  # fmt: skip
        return (reply,)


def load(facts, progress):
    assert "ATTENTION_API_KEY" not in os.environ
    if "stands" in facts["folder"]:
        time.sleep(600)
    for name in ("slow", "broken"):
        if name in facts["folder"]:
            for step in range(10):
                progress(step / 10)
                time.sleep(0.05)
    if "broken" in facts["folder"]:
        raise ValueError("a checkpoint at fault")
    return StandIn(facts)


if __name__ == "__main__":
    turns.serve(load)
