"""``attention compare`` and ``attention bench``: two attentions side by side, and a server under load."""
