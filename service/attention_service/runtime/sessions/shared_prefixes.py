"""Shared prefixes: full pages of equal inputs, after equal pages, are held once.

The name of a page is a hash of the name of the page before it and of the inputs of its tokens; before the first page
stands the module's version. Equal names mean equal keys and values.
Source: Kwon et al. 2023, section 4.4; Zheng et al. 2024 (SGLang), section 3.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.tensors import Array, dtype_name
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.pages import PagePool


@dataclass
class Prefix:
    """The names of one sequence's full pages, and the inputs of the page that is not full."""

    name: bytes
    """The name of the last full page."""
    page_tokens: int
    """Tokens of one page."""
    pages: int = 0
    """Number of full pages."""
    rest: list[bytes] = field(default_factory=list)
    """For each further token its inputs."""

    def copy(self) -> "Prefix":
        """The prefix of a copied sequence."""
        return Prefix(self.name, self.page_tokens, self.pages, list(self.rest))

    def extend(self, tokens: Sequence[bytes]) -> list[bytes]:
        """Add tokens, and return the names of the pages that are full now and were not before."""
        self.rest += tokens
        names = []
        while len(self.rest) >= self.page_tokens:
            page = hashlib.blake2b(self.name, digest_size=32)
            for token in self.rest[: self.page_tokens]:
                page.update(token)
            del self.rest[: self.page_tokens]
            self.name = page.digest()
            names.append(self.name)
        self.pages += len(names)
        return names

    def cut(self, tokens: int) -> bool:
        """Forget all but the first tokens. False if they end in a full page, whose inputs are not kept."""
        kept = tokens - self.pages * self.page_tokens
        if kept < 0:
            return False
        del self.rest[kept:]
        return True


def is_shareable(request: ForwardRequest) -> bool:
    """True if keys and values follow from the query, its places and the module alone."""
    return not (request.edits or request.parameters or request.key is not None or request.value is not None)


def share(pool: PagePool, tables: Sequence[BlockTable], prefixes: Sequence[Prefix], request: ForwardRequest) -> None:
    """Let pages that are full now and that others have too be held once. The tokens are appended already."""
    query = request.query.reshape(len(tables), -1, request.query.shape[-1])
    places = None if request.positions is None else request.positions.reshape(len(tables), -1)
    for row, (table, prefix) in enumerate(zip(tables, prefixes, strict=True)):
        first = prefix.pages
        for index, name in enumerate(
            prefix.extend(_inputs(query[row], None if places is None else places[row])), first
        ):
            own = table.page(index)
            held_page = pool.named(name, own)
            if held_page != own:
                table.replace_page(index, held_page)


def _inputs(query: Array, places: Array | None) -> list[bytes]:
    """The inputs of each token, as bytes."""
    dtype = dtype_name(query).encode()
    tokens = [dtype + row.tobytes() for row in np.ascontiguousarray(query)]
    if places is None:
        return tokens
    return [
        token + b"at" + int(place).to_bytes(8, "little", signed=True)
        for token, place in zip(tokens, places, strict=True)
    ]
