"""Maps, tables and coloured tokens as HTML for notebooks. ``notebook_replies`` has the registry."""
