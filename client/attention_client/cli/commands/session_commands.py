"""``attention sessions``."""

from attention_client.cli.commands.command_table import group

app = group("sessions")
