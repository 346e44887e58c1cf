"""A request over HTTP against the same computation in this process: what serving costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import torch
import uvicorn

from attention_client import Client
from attention_service.api.app import create_app
from attention_service.settings import Settings
from benchmarks.measure import Case

SIZES = {
    "W1: B1 L16 d64 h4": (1, 16, 64, 4),
    "W2: B1 L128 d256 h8": (1, 128, 256, 8),
    "B8 L512 d512 h8": (8, 512, 512, 8),
}


def cases() -> Iterator[Case]:
    """Self-attention of one module, by the client and by ``nn.MultiheadAttention``."""
    with serving() as url, Client(url) as client, Client(url, media_type="json") as json_client:
        for name, (batch, length, width, heads) in SIZES.items():
            module = f"bench-{width}"
            client.create_module(module, {"d_model": width, "num_heads": heads}, seed=0)
            query = np.random.default_rng(0).normal(size=(batch, length, width)).astype(np.float32)
            local = torch.nn.MultiheadAttention(width, heads, batch_first=True).eval()
            tensor = torch.from_numpy(query)

            def here(local: torch.nn.MultiheadAttention = local, x: torch.Tensor = tensor) -> object:
                with torch.inference_mode():
                    return local(x, x, x, need_weights=False)

            for form, by in (("safetensors", client), ("JSON, base64", json_client)):
                yield Case(
                    f"{name}, {form}",
                    lambda by=by, module=module, query=query: by.forward(module, query),
                    "nn.MultiheadAttention in this process",
                    here,
                )


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """The URL of a server with these settings, in this process."""
    with TemporaryDirectory() as folder:
        app = create_app(Settings(_env_file=None, models_dir=Path(folder), **settings))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started or app.state.engine.state != "ready":
            sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()
