"""The commands ``attention serve`` and ``fetch``, and ``python -m attention_service``."""

import gc
import os
from collections.abc import Sequence

from pydantic_settings import CliPositionalArg, SettingsConfigDict

from attention_service.parent_watch import end_with_parent
from attention_service.runtime.device.cpu_threads import sleep_while_waiting
from attention_service.settings import Settings
from attention_service.start_checks import can_listen, checked_settings


class FetchSettings(Settings):
    """Fetch a checkpoint from the Hugging Face hub into the model repository, on this machine."""

    model_config = SettingsConfigDict(cli_prog_name="attention fetch")

    repository: CliPositionalArg[str]
    """A repository of the hub, as in openai-community/gpt2."""

    revision: str | None = None
    """A branch, a tag or a commit; default: the main branch."""


# What runs the commands imports PyTorch, which takes seconds: settings that are wrong are told before.


def serve(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped. Returns the exit status."""
    settings = checked_settings(Settings, arguments)
    if settings is None:
        return 2
    if settings.parent_pid is not None:
        end_with_parent(settings.parent_pid)
    if not can_listen(settings):
        return 1
    sleep_while_waiting(os.environ)
    gc.disable()  # the server collects once what its imports leave; looking for it meanwhile takes a tenth of them
    from attention_service.commands import run_server  # noqa: PLC0415

    return run_server(settings)


serve.settings = Settings  # type: ignore[attr-defined]  # a program that starts a server checks its names by these


def fetch(arguments: Sequence[str] | None = None) -> int:
    """Fetch a checkpoint from the hub. Returns the exit status."""
    settings = checked_settings(FetchSettings, arguments)
    if settings is None:
        return 2
    from attention_service.commands import fetch_checkpoint  # noqa: PLC0415

    return fetch_checkpoint(settings, settings.repository, settings.revision)


if __name__ == "__main__":
    raise SystemExit(serve())
