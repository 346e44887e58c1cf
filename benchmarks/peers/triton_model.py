"""The model that Triton's Python backend loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as backend

from benchmarks.servers.attention import Attention


class TritonPythonModel:
    """The class that the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights."""
        parameters = json.loads(args["model_config"])["parameters"]
        weights, threads = (parameters[name]["string_value"] for name in ("weights", "threads"))
        self.attention = Attention(Path(weights), int(threads))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch."""
        queries = [backend.get_input_tensor_by_name(request, "query").as_numpy() for request in requests]
        if len({query.shape[1] for query in queries}) > 1:
            return [self._answer(query) for query in queries]
        joined = queries[0] if len(queries) == 1 else np.concatenate(queries)
        output = self.attention(torch.from_numpy(joined)).numpy()
        parts = np.split(output, np.cumsum([len(query) for query in queries])[:-1])
        return [backend.InferenceResponse([backend.Tensor("output", part)]) for part in parts]

    def _answer(self, query: np.ndarray[Any, Any]) -> Any:
        output = self.attention(torch.from_numpy(query)).numpy()
        return backend.InferenceResponse([backend.Tensor("output", output)])
