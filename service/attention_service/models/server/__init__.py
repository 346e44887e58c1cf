"""The server's half: the models by name, their processes, their memory, and the requests that wait for them."""
