"""LitServe around transformers, in batches of 16: ``python -m … FOLDER PORT THREADS``."""

import sys
from typing import Any

import litserve

from benchmarks.model_peers.transformers_answers import Model


class Answers(litserve.LitAPI):  # type: ignore[misc]
    """One route; the worker has the model."""

    def __init__(self, folder: str, threads: int, **options: Any) -> None:
        super().__init__(max_batch_size=16, batch_timeout=0.005, **options)
        self.given = folder, threads

    def setup(self, device: str) -> None:
        """Load the model, in the worker."""
        self.model = Model(*self.given)

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Leave requests as they are."""
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Leave answers as they are."""
        return output


class Generate(Answers):
    """Greedy tokens at ``/generate``."""

    def predict(self, inputs: list[Any]) -> list[Any]:
        """Answer a batch."""
        made = self.model.generated([each["ids"] for each in inputs], max(each["max_new_tokens"] for each in inputs))
        return [{"ids": ids} for ids in made]


class Weights(Answers):
    """The weights of every head at ``/weights``."""

    def predict(self, inputs: list[Any]) -> list[Any]:
        """Answer a batch."""
        return self.model.weights([each["ids"] for each in inputs])


def main(folder: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    apis = [
        kind(folder, int(threads), api_path=path) for kind, path in ((Generate, "/generate"), (Weights, "/weights"))
    ]
    litserve.LitServer(apis, accelerator="cpu").run(
        port=int(port), host="127.0.0.1", log_level="error", generate_client_file=False
    )


if __name__ == "__main__":
    main(*sys.argv[1:4])
