"""vLLM's workers, which tell the observer of each pass. ``--worker-cls`` names one."""

import logging
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from attention_vllm.attention_outputs import AttentionOutputs
from attention_vllm.bound_asks import KnownModel
from attention_vllm.engine_refusals import refused_engine
from attention_vllm.inside.trial_passes import refused_by_trial
from attention_vllm.layer_facts import LayerFacts
from attention_vllm.observing_layers import ObservingLayer
from attention_vllm.rank_heads import RankHeads
from attention_vllm.worker_process import OBSERVER

_COMPILED: Final = "compiled graphs hide it; start vLLM with --enforce-eager"
_log = logging.getLogger("vllm.attention_vllm")


class ObservedPasses:
    """Before a worker of vLLM's among the bases of a class."""

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then decide whether asks are answered: a failed self-test never ends the worker."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        try:
            self._decide()
        except Exception as fault:
            _log.exception("the self-test of attention failed")
            OBSERVER.refusal = f"the self-test failed ({type(fault).__name__}: {fault})"
        if OBSERVER.refusal is None:
            _log.info("attention of %d layers is told of", len(OBSERVER.model.facts))
        else:
            _log.warning("attention is not told of: %s", OBSERVER.refusal)
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a pass."""
        OBSERVER.begin(scheduler_output, self.model_runner)  # type: ignore[attr-defined]
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        with torch.inference_mode():
            OBSERVER.end()
        return output

    def _decide(self) -> None:
        worker: Any = self
        OBSERVER.refusal = refused_engine(worker.vllm_config)
        if OBSERVER.refusal is not None:
            return
        facts, kernels = {}, {}
        for name, layer in get_layers_from_vllm_config(worker.vllm_config, Attention).items():
            if isinstance(layer.impl, ObservingLayer):
                number = extract_layer_index(name)
                if number in facts:
                    OBSERVER.refusal = f"layer {number} has several attentions"
                    return
                layer.impl.attention_layer = number
                facts[number], kernels[number] = LayerFacts.of(layer.impl), layer
        ranks, model = worker.parallel_config.tensor_parallel_size, worker.model_config
        share = RankHeads.of(worker.rank % ranks, ranks, model.get_total_num_kv_heads())
        OBSERVER.model = KnownModel(dict(sorted(facts.items())), share, _COMPILED, worker.device)
        if not model.enforce_eager:
            OBSERVER.refusal = refused_by_trial(worker, OBSERVER)
            return
        OBSERVER.outputs = AttentionOutputs.of(worker.model_runner.get_model(), kernels)
        with OBSERVER.outputs.trial([*OBSERVER.model.facts]) as trial:
            OBSERVER.refusal = refused_by_trial(worker, OBSERVER)
        OBSERVER.model = replace(OBSERVER.model, outputs=trial.verdict())


class ObservingCPUWorker(ObservedPasses, CPUWorker):
    """The worker of a CPU."""


class ObservingGPUWorker(ObservedPasses, Worker):
    """The worker of a GPU. Never run on one."""
