"""The last query of a text in a pass, as the problem of an attention that has this query alone."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_service.core.problem import Problem
from attention_service.models.passes.attention_pass import problem_of
from attention_transformers.function_calls import attention_call

BY_QUERY: Final = frozenset({"position_bias", "indices"})
"""Arguments of an attention function that have a dimension of queries, the last but one."""


def last_query(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> Problem:
    """The problem of the last query of one text."""
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., -1:, :]
    cut: dict[str, Tensor] = {}
    for name in BY_QUERY.intersection(options):
        if (given := options[name]) is not None:
            cut[name] = given[..., -1:, :]
    return problem_of(attention_call(module, query[:, :, -1:], key, value, mask, **{**options, **cut}).raw())


def last_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any],
    ends: Tensor,
) -> Problem:  # fmt: skip
    """The problem of the last query of each of several texts that begin at the first key. ``ends [R]``: its place."""
    if mask is None:  # as causal as the module
        mask = (torch.arange(key.shape[2], device=ends.device) <= ends[:, None])[:, None, None]
    else:
        mask = _at(mask, ends)
    given = {name: tensor for name in BY_QUERY.intersection(options) if (tensor := options[name]) is not None}
    cut = {name: _at(tensor, ends) for name, tensor in given.items()}
    call = attention_call(module, _at(query, ends), key, value, mask, **{**options, **cut})
    return problem_of(call.raw(whole=True))


def _at(x: Tensor, ends: Tensor) -> Tensor:
    """The numbers ``[R, …, 1, N]`` of one query of each text, of ``[R or 1, …, Q or 1, N]``."""
    if x.shape[-2] == 1:
        return x
    rows = torch.arange(len(ends), device=ends.device) if len(x) > 1 else torch.zeros_like(ends)
    return x[rows, ..., ends, :].unsqueeze(-2)
