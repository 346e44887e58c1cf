"""The server itself: what it runs, what it can compute, and how it is."""

from typing import Unpack

from attention_client.calls import CallOptions, call
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.server import Health, ServerInfo, VariantList


class Server(Resource):
    """Questions about the server."""

    def info(self, **options: Unpack[CallOptions]) -> ServerInfo:
        """Return version, device, dtypes, limits and memory of the server."""
        return self.send(call(operations.server_info, locals()))

    def variants(self, **options: Unpack[CallOptions]) -> VariantList:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return self.send(call(operations.list_variants, locals()))

    def hardware(self, **options: Unpack[CallOptions]) -> HardwareList:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return self.send(call(operations.list_hardware, locals()))

    def accuracy(self, **options: Unpack[CallOptions]) -> AccuracyReply:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return self.send(call(operations.accuracy, locals()))

    def live(self, **options: Unpack[CallOptions]) -> Health:
        """Return if the process answers. Never repeated."""
        return self.send(call(operations.health_live, locals()))

    def ready(self, **options: Unpack[CallOptions]) -> Health:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return self.send(call(operations.health_ready, locals()))


class AsyncServer(AsyncResource):
    """The same calls as ``Server``, awaited."""

    async def info(self, **options: Unpack[CallOptions]) -> ServerInfo:
        """Return version, device, dtypes, limits and memory of the server."""
        return await self.send(call(operations.server_info, locals()))

    async def variants(self, **options: Unpack[CallOptions]) -> VariantList:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return await self.send(call(operations.list_variants, locals()))

    async def hardware(self, **options: Unpack[CallOptions]) -> HardwareList:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return await self.send(call(operations.list_hardware, locals()))

    async def accuracy(self, **options: Unpack[CallOptions]) -> AccuracyReply:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return await self.send(call(operations.accuracy, locals()))

    async def live(self, **options: Unpack[CallOptions]) -> Health:
        """Return if the process answers. Never repeated."""
        return await self.send(call(operations.health_live, locals()))

    async def ready(self, **options: Unpack[CallOptions]) -> Health:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return await self.send(call(operations.health_ready, locals()))
