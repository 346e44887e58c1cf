"""Memory of a budget that has one owner, who takes it and gives it back."""

from attention_service.runtime.scheduling.budget import Budget


class Reservation:
    """Bytes of a budget. Its owner gives them back in a ``finally`` around all that takes them.

    No task stands between the budget and its owner: a cancelled ``take`` has taken nothing, and what one took is known
    here in the same turn of the event loop.
    """

    def __init__(self, budget: Budget, caller: str) -> None:
        """``caller``: the name of the caller for whom it waits in turn."""
        self._budget = budget
        self._caller = caller
        self._bytes: int | None = None

    async def take(self, need: int) -> None:
        """Wait for so many bytes, and hold them in place of those before. Raises what ``Budget.acquire`` does.

        Those before are given back first, so that no two owners wait for each other's.
        """
        self.give_back()
        await self._budget.acquire(need, self._caller)
        self._bytes = need

    def take_now(self, need: int) -> bool:
        """Hold so many bytes in place of those before, if they are free and nobody waits. Else hold none."""
        self.give_back()
        if taken := self._budget.take(need):
            self._bytes = need
        return taken

    def give_back(self) -> None:
        """Give all back; nothing if it holds nothing."""
        held, self._bytes = self._bytes, None
        if held is not None:
            self._budget.release(held)
