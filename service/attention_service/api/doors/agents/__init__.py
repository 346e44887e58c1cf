"""``/mcp``: tools by which agents ask the service, over the Model Context Protocol. Optional, and off by default.

It imports ``api/handlers.py`` and the protocol's package. Read ``agent_door.py`` first.
"""
