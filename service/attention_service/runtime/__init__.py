"""The engine: plan, admit, execute; and what runs there. Knows no protocol."""
