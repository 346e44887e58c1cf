"""``attention sessions``."""

from attention_client.cli.command_table import group

app = group("sessions")
