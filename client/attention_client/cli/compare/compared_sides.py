"""The two sides of ``attention compare``: a kernel, spec, module, version, checkpoint layer or local torch module."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client.cli.arguments import example_inputs, tensor_arguments
from attention_client.cli.arguments.model_options import Fields
from attention_client.cli.invocation import send
from attention_client.client import Client
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec

if TYPE_CHECKING:
    from attention_client.cli.compare.local_torch import LocalModule

_TAPS: Final = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "output")
_METHOD_TAPS: Final = ("q", "k", "v", "context", "output")
_LAYER: Final = re.compile(r"(?P<path>.+)#(?:(?P<stack>[a-z]+)\.)?(?P<layer>\d+)(?:\.(?P<part>self|cross))?")
"""A layer of a checkpoint, as ``path#[stack.]layer[.cross]``."""


@dataclass(frozen=True)
class Side:
    """One attention on the service, or a local module in its place."""

    label: str
    name: str | None = None
    """A resident module; None for raw attention."""
    config: ModuleConfig | None = None
    fields: Fields = field(default_factory=dict)
    """Request fields of this side alone: spec, kernel, version."""
    is_kernel: bool = False
    local: "LocalModule | None" = None

    @property
    def raw(self) -> bool:
        """True if it takes q, k and v."""
        return self.name is None and self.local is None

    def run(
        self, client: Client, inputs: Fields, upstream: Callable[[Any], Any] | None, seed: int
    ) -> tuple[dict[str, NDArray[Any]], float | None]:
        """Return its taps and gradients by name, and the milliseconds that it computed if the service did.

        ``upstream`` makes ∂L/∂output for an output; None leaves gradients out.
        """
        if self.local is not None:
            first = self.local.run(inputs, None)
            return (first if upstream is None else self.local.run(inputs, upstream(first["output"]))), None
        sent = inputs | self.fields
        if self.name is None:
            sent = example_inputs.with_learned(client, sent, np.random.default_rng(seed))
        spec = self.config.spec if self.config else AttentionSpec.model_validate(sent.get("spec") or {})
        taps = ("output",) if self.is_kernel else _TAPS if spec.method.name == "exact" else _METHOD_TAPS
        reply = send(client, "forward", self.name, sent | {"return_": taps})
        results = {tap: np.asarray(getattr(reply, tap)) for tap in taps}
        if upstream is not None:
            wrt = [role for role in ("query", "key", "value") if role in inputs]
            options = {"wrt": wrt, "upstream": upstream(results["output"])}
            gradients = send(client, "gradients", self.name, sent | options).gradients
            results |= {f"∂L/∂{role}": gradients[role] for role in wrt}
        return results, reply.ran.compute_ms


class Sides:
    """Reads what a side is from its text, and removes the modules that were made for a comparison at the end."""

    def __init__(
        self, client: Client, module: str | None, num_heads: int | None, spec: Fields | None, stack: ExitStack
    ) -> None:
        self._client, self._module, self._num_heads, self._stack = client, module, num_heads, stack
        self._spec_over = spec
        self._modules = {one.name: one for one in client.modules.list().modules}

    def read(self, text: str, other: Side | None = None) -> Side:
        """Return the side that a text names. A file of parameters takes the config of the other side."""
        kind, colon, rest = text.partition(":")
        readers = {"kernel": self._kernel, "module": self._resident, "spec": self._spec, "checkpoint": self._checkpoint}
        if colon and kind in readers:
            return readers[kind](rest)
        if text.lstrip().startswith("{") or text.endswith(".json"):
            return self._spec(text)
        if text.endswith(".safetensors") and Path(text).is_file():
            return self._tensors(text, other)
        reader = (
            self._local if Path(text.rpartition(":")[0]).suffix == ".py"
            else self._checkpoint if "#" in text
            else self._resident if text.partition("@")[0] in self._modules
            else self._kernel
        )  # fmt: skip
        return reader(text)

    def _kernel(self, name: str) -> Side:
        config = None if self._module is None else self._client.modules.get(self._module).config
        return Side(name, self._module, config, {"kernel": name}, is_kernel=True)

    def _resident(self, text: str) -> Side:
        name, _, version = text.partition("@")
        info = self._client.modules.get(name)
        return Side(text, name, info.config, {"version": version} if version else {})

    def _spec(self, text: str) -> Side:
        return Side(text, fields={"spec": tensor_arguments.read_object(text, "spec")})

    def _checkpoint(self, text: str) -> Side:
        match = _LAYER.fullmatch(text)
        if match is None:
            raise typer.BadParameter(
                f"expected a checkpoint and a layer, as in minilm#3 or bart#decoder.0.cross; got {text!r}",
                param_hint="A, B",
            )
        arguments: dict[str, Any] = {"stack": match["stack"], "layer": int(match["layer"]), "name": self._fresh()}
        arguments |= {"part": match["part"] or "self", "num_heads": self._num_heads, "spec": self._spec_over}
        info = self._client.modules.import_(match["path"], **arguments)
        return self._kept(text, info.name, info.config)

    def _tensors(self, text: str, other: Side | None) -> Side:
        held = tensor_arguments.read_all(text, "parameters")
        if "q_proj.weight" not in held:
            return self._local(text)
        if other is None or other.config is None:
            raise typer.BadParameter(
                f"{text} has only parameters, so the side before it must be a module", param_hint="A, B"
            )
        info = self._client.modules.create(self._fresh(), other.config, parameters=held)
        return self._kept(text, info.name, info.config)

    def _local(self, text: str) -> Side:
        try:
            from attention_client.cli.compare import local_torch  # noqa: PLC0415 - torch is an extra
        except ModuleNotFoundError as fault:
            raise typer.BadParameter(
                f"{text} needs {fault.name}: pip install 'attention-service[torch]'", param_hint="A, B"
            ) from None
        heads = self._num_heads
        if heads is None:
            heads = next((one.config.num_heads for one in self._modules.values() if one.name == self._module), None)
        try:
            return Side(text, local=local_torch.from_file(text, heads))
        except local_torch.LocalModuleError as fault:
            raise typer.BadParameter(str(fault), param_hint="A, B") from None

    @staticmethod
    def _fresh() -> str:
        return f"compare.{uuid4().hex[:12]}"

    def _kept(self, text: str, name: str, config: ModuleConfig) -> Side:
        self._stack.callback(self._client.modules.delete, name)
        return Side(text, name, config)
