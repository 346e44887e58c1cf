"""The devices that a model is spread over: those that a request names, or as many as the server's setting says."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.models import LoadModel
from attention_service.models.folders.adapter_catalogue import AdapterFolder
from attention_service.models.folders.model_catalogue import ModelFolder
from attention_service.models.folders.spread_models import spread_refusal
from attention_service.runtime.device.torch_device import Device


class ModelDevices(NamedTuple):
    """The devices of one server."""

    own: Device
    """The one that it computes on itself."""
    default: int
    """The devices of a model that can be spread over so many."""

    def of_request(self, request: LoadModel, folder: ModelFolder, adapter: AdapterFolder | None) -> Sequence[str]:
        """The devices of a model that a request loads. Raises InvalidRequest for those that it cannot have."""
        if request.devices is None:
            return () if request.device_map is not None or adapter is not None else self.of_folder(folder)
        names = self._named(request.devices)
        if len(names) == 1:
            return names
        if request.device_map is not None:
            raise InvalidRequest.at("devices", "expected no device_map beside several devices")
        if adapter is not None or folder.adapter is not None:
            raise InvalidRequest.at("devices", "a model with an adapter is computed on one device alone")
        if (reason := spread_refusal(folder.form.facts, len(names))) is not None:
            raise InvalidRequest.at("devices", f"{folder.checkpoint} is not spread over {len(names)} devices: {reason}")
        return names

    def of_folder(self, folder: ModelFolder) -> Sequence[str]:
        """The devices of a model of which no request says any."""
        if self.default == 1 or folder.adapter is not None or spread_refusal(folder.form.facts, self.default):
            return ()
        return self._named(self.default)

    def _named(self, wanted: int | Sequence[str]) -> Sequence[str]:
        there = torch.cuda.device_count() if self.own.is_cuda else 0
        if isinstance(wanted, int):
            if self.own.is_cuda and wanted > there:
                raise InvalidRequest.at("devices", f"expected at most {there}, the GPUs of this server; got {wanted}")
            return [f"cuda:{index}" for index in range(wanted)] if self.own.is_cuda else ["cpu"] * wanted
        known = {f"cuda:{index}" for index in range(there)} if self.own.is_cuda else {"cpu"}
        if unknown := [name for name in wanted if name not in known]:
            raise InvalidRequest.at("devices", f"expected some of {', '.join(sorted(known))}; got {unknown[0]}")
        if self.own.is_cuda and len(set(wanted)) < len(wanted):
            raise InvalidRequest.at("devices", "expected each GPU once")
        return wanted
