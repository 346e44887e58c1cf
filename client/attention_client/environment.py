"""The variables that a client reads, and the address without one."""

from typing import Final

URL_VARIABLE: Final = "ATTENTION_URL"
KEY_VARIABLE: Final = "ATTENTION_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
