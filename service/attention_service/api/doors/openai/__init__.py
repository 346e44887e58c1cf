"""The door for clients of OpenAI's API: chat completions, completions, embeddings, server-sent events, errors.

It imports ``api/handlers.py`` alone. Read ``openai_handlers.py`` first.
"""
