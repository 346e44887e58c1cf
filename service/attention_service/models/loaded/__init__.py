"""A loaded model: its weights, its tokenizer and its attentions.

It imports ``inputs`` and the rooms below it. Read ``loaded_model.py`` first.
"""
