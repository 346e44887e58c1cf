"""The variables that a client reads, the address without one, and where the server's commands are found."""

from typing import Final

URL_VARIABLE: Final = "ATTENTION_URL"
KEY_VARIABLE: Final = "ATTENTION_API_KEY"
AUTOSTART_VARIABLE: Final = "ATTENTION_AUTOSTART"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
COMMAND_GROUP: Final = "attention.commands"
"""The group of entry points by which packages contribute commands, the server's among them."""
