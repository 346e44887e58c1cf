"""Files of published Jacobian lenses, ``…_jacobian_lens.pt``: read and written by torch, with ``weights_only``.

A file is a dictionary: ``J``, the matrices ``[d_model, d_model]`` in float16 by the number of their layer;
``source_layers``, ``n_prompts`` and ``d_model``. Source: ``JacobianLens`` of https://github.com/anthropics/jacobian-lens,
as its readers at https://github.com/hijohnnylin/neuronpedia (``lens_loader.py``) describe it.
"""

import pickle
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import LensMatrices

_MAX_FLOAT16: Final = float(torch.finfo(torch.float16).max)


def read_published_lens(path: str | Path) -> dict[str, NDArray[np.float32]]:
    """Return the matrices of a published lens by the number of their layer, for ``client.models.fit_lens``.

    No code of the file runs: torch opens it with ``weights_only``. Raises InvalidRequest for another file.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as fault:
        raise InvalidRequest.at("jacobians", f"{path} is no file of tensors alone: {str(fault)[:200]}") from None
    matrices = content.get("J") if isinstance(content, dict) else None
    if not isinstance(matrices, dict) or not all(isinstance(matrix, torch.Tensor) for matrix in matrices.values()):
        raise InvalidRequest.at("jacobians", f"{path} is no Jacobian lens: expected its matrices by layer under J")
    return {str(layer): matrix.float().numpy() for layer, matrix in matrices.items()}


def write_published_lens(path: str | Path, lens: LensMatrices) -> None:
    """Write a fitted lens in the published form. Raises InvalidRequest for numbers that float16 does not have."""
    if any(np.abs(matrix).max(initial=0) > _MAX_FLOAT16 for matrix in lens.jacobians.values()):
        raise InvalidRequest.at("lens", f"the form holds float16, up to {_MAX_FLOAT16}; the lens has larger numbers")
    matrices = {int(layer): torch.from_numpy(np.array(matrix)).half() for layer, matrix in lens.jacobians.items()}
    content = {"J": matrices, "source_layers": sorted(matrices), "n_prompts": lens.texts, "d_model": lens.width}
    torch.save(content, path)
