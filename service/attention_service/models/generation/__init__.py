"""Generation: its settings, the tokens one by one, their attention, and the objects of OpenAI's API."""
