"""HTTP: routes that only translate, access, content negotiation, problem+json, metrics, and the pages of documents.

``doors`` has the protocols of others: OpenAI's API, the Open Inference Protocol, and tools for agents.

It imports the engine and what is below it, and is the only package with FastAPI. Read ``app.py`` first.
"""
