"""GGUF files as models: the config that llama.cpp implies for each architecture, before anything is loaded.

Facts are those of llama.cpp 0.5.0, ``src/llama-model.cpp`` and the file of each architecture in ``src/models``
(https://github.com/ggml-org/llama.cpp/tree/v0.5.0/src/models). It imports ``form.py`` of the
forms. Read ``gguf_form.py`` first.
"""
