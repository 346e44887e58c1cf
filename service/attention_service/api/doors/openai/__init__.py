"""The door for clients of OpenAI's API: chat completions, completions, embeddings, server-sent events, errors."""
