"""Schemas of further requests of OpenAI's API and vLLM's, beside those that generate by chats and completions."""
