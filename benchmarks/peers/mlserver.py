"""MLServer, in one process; tensors come and go as the lists of the Open Inference Protocol."""

import asyncio
import sys
from pathlib import Path

import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.servers.attention import Attention


class AttentionModel(MLModel):  # type: ignore[misc]
    """The model of the name ``attention``."""

    async def load(self) -> bool:
        """Load the weights."""
        parameters = self.settings.parameters
        self.attention = Attention(Path(parameters.uri), parameters.threads)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        query = torch.from_numpy(NumpyCodec.decode_input(payload.inputs[0]))
        output = NumpyCodec.encode_output("output", self.attention(query).numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    settings = Settings(
        host="127.0.0.1", http_port=int(port), grpc_port=0, metrics_endpoint=None, parallel_workers=0, debug=False
    )
    model = ModelSettings(
        name="attention", implementation=AttentionModel, parameters=ModelParameters(uri=weights, threads=int(threads))
    )
    asyncio.run(MLServer(settings).start([model]))


if __name__ == "__main__":
    main(*sys.argv[1:])
