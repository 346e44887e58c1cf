"""One pass over a model: its attentions, what is asked of each, and the points between its layers.

It imports ``folders`` and what is below it, and this package's core. Read ``attention_pass.py`` first.
"""
