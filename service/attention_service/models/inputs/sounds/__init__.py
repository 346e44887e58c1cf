"""Sounds as inputs: decoded, as frames that an encoder makes of them, and beside text in a prompt."""
