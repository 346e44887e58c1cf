"""The server itself: what it runs, what it can compute, and how it is."""

from typing import Unpack

from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Group, WayT, method
from attention_contract import operations
from attention_contract.schemas.costs.accuracy import AccuracyReply
from attention_contract.schemas.costs.hardware import HardwareList
from attention_contract.schemas.server import Health, ServerInfo, VariantList


class Server(Group[WayT]):
    """Questions about the server."""

    @method
    def info(self, **options: Unpack[CallOptions]) -> Call[ServerInfo]:
        """Return version, device, dtypes, limits and memory of the server."""
        return call(operations.server_info, locals())

    @method
    def variants(self, **options: Unpack[CallOptions]) -> Call[VariantList]:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return call(operations.list_variants, locals())

    @method
    def hardware(self, **options: Unpack[CallOptions]) -> Call[HardwareList]:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return call(operations.list_hardware, locals())

    @method
    def accuracy(self, **options: Unpack[CallOptions]) -> Call[AccuracyReply]:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return call(operations.accuracy, locals())

    @method
    def live(self, **options: Unpack[CallOptions]) -> Call[Health]:
        """Return if the process answers. Never repeated."""
        return call(operations.health_live, locals())

    @method
    def ready(self, **options: Unpack[CallOptions]) -> Call[Health]:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return call(operations.health_ready, locals())
