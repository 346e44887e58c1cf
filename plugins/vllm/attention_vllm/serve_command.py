"""The command ``attention-vllm serve MODEL …``: ``vllm serve`` with this plugin's worker and door."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from attention_vllm.result_channel import SOCKETS

WORKERS = {
    True: "attention_vllm.inside.observing_workers.ObservingCPUWorker",
    False: "attention_vllm.inside.observing_workers.ObservingGPUWorker",
}
"""The class of workers, by whether vLLM computes on a CPU."""
DOOR = "attention_vllm.door.attention_door.AttentionDoor"


def with_plugin(arguments: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the arguments of ``vllm`` with those of the plugin behind them."""
    return [*arguments, "--worker-cls", WORKERS[on_cpu], "--middleware", DOOR]


def main() -> None:
    """Become ``vllm serve`` with the arguments of the command line."""
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: attention-vllm serve MODEL [options of vllm serve]")
    from vllm.entrypoints.cli.main import main as serve  # noqa: PLC0415 - vLLM only
    from vllm.platforms import current_platform  # noqa: PLC0415

    sys.argv = ["vllm", *with_plugin(sys.argv[1:], on_cpu=current_platform.is_cpu())]
    with socket_folder():
        serve()


@contextmanager
def socket_folder() -> Iterator[None]:
    """Name a folder for sockets that nobody else may enter, and remove it in the end, unless one is named already."""
    if SOCKETS in os.environ:
        yield
        return
    with TemporaryDirectory(prefix="attention-vllm-", ignore_cleanup_errors=True) as folder:
        os.environ[SOCKETS] = folder
        yield
