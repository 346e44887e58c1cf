"""The files of a request, sent as text in base64."""

import binascii
from base64 import b64decode
from io import BytesIO

from attention_contract.errors import InvalidRequest


def file_of(base64: str, param: str) -> BytesIO:
    """The bytes of a file. Raises InvalidRequest."""
    try:
        return BytesIO(b64decode(base64, validate=True))
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{param}.base64: expected the bytes of a file in base64", param=param) from None
