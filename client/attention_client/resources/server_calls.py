"""The server itself: what it runs, what it can compute, and how it is."""

from attention_client.calls import call
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.server import Health, ServerInfo, VariantList


class Server(Resource):
    """Questions about the server."""

    def info(self) -> ServerInfo:
        """Return version, device, dtypes, limits and memory of the server."""
        return self.send(call(operations.server_info, {}))

    def variants(self) -> VariantList:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return self.send(call(operations.list_variants, {}))

    def hardware(self) -> HardwareList:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return self.send(call(operations.list_hardware, {}))

    def accuracy(self) -> AccuracyReply:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return self.send(call(operations.accuracy, {}))

    def live(self) -> Health:
        """Return if the process answers. Never repeated."""
        return self.send(call(operations.health_live, {}))

    def ready(self) -> Health:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return self.send(call(operations.health_ready, {}))


class AsyncServer(AsyncResource):
    """The same calls as ``Server``, awaited."""

    async def info(self) -> ServerInfo:
        """Return version, device, dtypes, limits and memory of the server."""
        return await self.send(call(operations.server_info, {}))

    async def variants(self) -> VariantList:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return await self.send(call(operations.list_variants, {}))

    async def hardware(self) -> HardwareList:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return await self.send(call(operations.list_hardware, {}))

    async def accuracy(self) -> AccuracyReply:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return await self.send(call(operations.accuracy, {}))

    async def live(self) -> Health:
        """Return if the process answers. Never repeated."""
        return await self.send(call(operations.health_live, {}))

    async def ready(self) -> Health:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return await self.send(call(operations.health_ready, {}))
