"""The addresses of arrays: whole taps of one head, as resources that an agent reads only to compute with them."""

import re
from typing import Any, Final, NamedTuple

from mcp_types import ResourceLink

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import head_name
from attention_contract.schemas.models import LayerRef, layer_of
from attention_contract.wire import SAFETENSORS

TAPS: Final = ("weights", "scores", "q", "k", "v", "context")
TEMPLATE: Final = "attention://inputs/{input}/layers/{layer}/heads/{head}/{tap}"
_ADDRESS: Final = re.compile(
    r"attention://inputs/(in_[0-9a-f]{12})/layers/((?:[a-z_]{1,32}\.)?\d{1,4})/heads/(\d{1,5})/([a-z]+)"
)


class ArrayAddress(NamedTuple):
    """The address of one tap of one head over an input."""

    input: str
    layer: LayerRef
    head: int
    tap: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a forward request whose reply is the array."""
        return {"layers": [self.layer], "select": {"heads": [self.head]}, "return": [self.tap], "top_k": 0}

    def link(self) -> ResourceLink:
        """Return the link that an answer carries."""
        place = head_name(self.layer, self.head)
        return ResourceLink(
            uri=TEMPLATE.format(**self._asdict()),
            name=f"{self.tap} of head {place}",
            description=f"The whole array {self.tap} of head {place}, as a safetensors file.",
            mime_type=SAFETENSORS,
        )


def address_of(uri: str) -> ArrayAddress:
    """Read an address. Raises InvalidRequest."""
    match = _ADDRESS.fullmatch(uri)
    if match is None or match[4] not in TAPS:
        raise InvalidRequest.at(
            "uri",
            f"no array has this address; expected {TEMPLATE} with a tap of {', '.join(TAPS)}. Call look_at_head or "
            "explain_weight, whose answers have links",
        )
    handle, layer, head, tap = match.groups()
    return ArrayAddress(handle, layer_of(layer), int(head), tap)
