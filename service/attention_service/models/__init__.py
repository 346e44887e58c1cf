"""Whole models: each in a process of its own, which transformers computes but for its attention.

``server`` is the server's half, ``process`` that of the model. The process answers questions by ``answers`` at the
price that ``costs`` tells, and writes texts by ``generation``. Below are the model itself (``loaded``), its ``inputs``,
its ``passes``, and the ``folders`` that models come from.

It imports the runtime and what is below it; its two halves meet in messages. Read ``worker_messages.py`` first.
"""
