"""``/mcp``: tools by which agents ask the service, over the Model Context Protocol. Optional, and off by default."""
