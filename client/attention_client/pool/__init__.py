"""Connections kept open: transports for httpx that carry HTTP/1.1 and nothing else, and so take a fraction of its time.

What makes the difference: responses are parsed in C (httptools), a request's small pieces leave in one packet, large
ones from the arrays' own memory, and a body is received into the one buffer that the reply's arrays then view. Both are
used by ``Client`` and ``AsyncClient`` unless told otherwise, and can be given to any httpx client.
"""

from attention_client.pool.awaited import AsyncPool
from attention_client.pool.blocking import Pool

__all__ = ["AsyncPool", "Pool"]
