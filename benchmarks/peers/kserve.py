"""The server of the KServe SDK: the Open Inference Protocol, as lists and with tensors as bytes."""

import sys
from pathlib import Path

import torch
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

from benchmarks.servers.attention import Attention


class AttentionModel(Model):  # type: ignore[misc]
    """The model of the name ``attention``."""

    def __init__(self, attention: Attention) -> None:
        super().__init__("attention")
        self.attention = attention
        self.ready = True

    async def predict(
        self,
        payload: InferRequest,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> InferResponse:
        """Answer one request, in the form in which it asks."""
        output = self.attention(torch.from_numpy(payload.inputs[0].as_numpy())).numpy()
        answer = InferOutput("output", list(output.shape), "FP32")
        wanted = payload.request_outputs or []
        answer.set_data_from_numpy(output, binary_data=bool(wanted and wanted[0].binary_data))
        return InferResponse(payload.id or "", self.name, [answer], requested_outputs=payload.request_outputs)


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    server = ModelServer(http_port=int(port), enable_grpc=False, access_log_format=None)
    server.start([AttentionModel(Attention(Path(weights), int(threads)))])


if __name__ == "__main__":
    main(*sys.argv[1:])
