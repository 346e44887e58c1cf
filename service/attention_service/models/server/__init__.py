"""The server's half: the models by name, their processes, their memory, and the requests that wait for them.

It imports ``folders`` and what is below it, the messages and the runtime; neither ``process`` nor transformers.
Read ``model_service.py`` first.
"""
