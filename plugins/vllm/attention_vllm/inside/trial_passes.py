"""The self-test at start: passes over 40 tokens alone, and beside others, in which every query is compared.

The passes are made by hand, as the warm-up of vLLM's model runner V2 makes its own (``v1/worker/gpu/warmup.py``), in
pages that no request has yet.
"""

from typing import Any, Final

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from attention_vllm.kernel_trial import KernelTrial
from attention_vllm.pass_observer import PassObserver

ALONE, LONG, SHORT = "_attention_alone", "_attention_long", "_attention_short"
"""The requests of the trial."""
TOKENS: Final = {ALONE: 40, LONG: 40, SHORT: 25}
_MIN_TOKENS: Final = 8


def refused_by_trial(worker: Any, observer: PassObserver) -> str | None:
    """Run the self-test in a worker. Returns the reason to refuse asks; None if all is as computed."""
    config = worker.vllm_config
    most = min(config.model_config.max_model_len - 2, config.scheduler_config.max_num_batched_tokens)
    together = config.scheduler_config.max_num_seqs > 1
    lengths = {ALONE: min(TOKENS[ALONE], most)}
    if together:
        lengths |= {name: min(TOKENS[name], most * TOKENS[name] // 65) for name in (LONG, SHORT)}
    if min(lengths.values()) < _MIN_TOKENS:
        return f"the self-test needs passes of {2 * _MIN_TOKENS} tokens and more"
    observer.trial = trial = KernelTrial(frozenset(lengths))
    try:
        _run(worker, lengths)
    finally:
        observer.trial = None
    queries = sum(lengths.values()) + (2 if together else 0)
    return trial.verdict(frozenset(observer.model.facts), queries)


def _run(worker: Any, lengths: dict[str, int]) -> None:
    def step(scheduled: Any) -> None:
        if worker.execute_model(scheduled) is None:
            worker.sample_tokens(None)

    def finish(*names: str) -> None:
        done = SchedulerOutput.make_empty()
        done.finished_req_ids = set(names)
        worker.execute_model(done)

    try:
        step(_first_pass(worker, {ALONE: lengths[ALONE]}))
    finally:
        finish(ALONE)
    others = {name: count for name, count in lengths.items() if name != ALONE}
    if not others:
        return
    try:
        step(_first_pass(worker, others))
        following = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        cached.req_ids = [*others]
        cached.num_computed_tokens = [*others.values()]
        cached.num_output_tokens = [1 for _ in others]
        cached.new_block_ids = [None for _ in others]
        following.scheduled_cached_reqs = cached
        following.num_scheduled_tokens = dict.fromkeys(others, 1)
        following.total_num_scheduled_tokens = len(others)
        step(following)
    finally:
        finish(*others)


def _first_pass(worker: Any, lengths: dict[str, int]) -> Any:
    """The pass that reads new prompts of these lengths. Page 0 is nobody's in vLLM."""
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    vocabulary = worker.model_config.get_vocab_size()
    page = 1
    scheduled = SchedulerOutput.make_empty()
    for at, (name, count) in enumerate(lengths.items()):
        blocks = []
        for group in groups:
            needed = -(-(count + 1) // group.kv_cache_spec.block_size)
            blocks.append([*range(page, page + needed)])
            page += needed
        if page > worker.model_runner.kv_cache_config.num_blocks:
            raise ValueError("too few pages")
        tokens = [(7 * place + 3 + at) % vocabulary for place in range(count)]
        scheduled.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name, prompt_token_ids=tokens, mm_features=[], pooling_params=None, num_computed_tokens=0,
                sampling_params=SamplingParams(max_tokens=2, temperature=0.0), block_ids=tuple(blocks),
                lora_request=None, prefill_token_ids=tokens,
            )
        )  # fmt: skip
    scheduled.num_scheduled_tokens = dict(lengths)
    scheduled.total_num_scheduled_tokens = sum(lengths.values())
    return scheduled
