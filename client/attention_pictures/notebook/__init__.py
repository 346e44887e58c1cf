"""Maps, tables and coloured tokens as HTML for notebooks; the registry is ``attention_pictures.notebook_replies``."""
