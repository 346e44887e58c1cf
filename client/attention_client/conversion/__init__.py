"""Checkpoints in other forms as folders that servers and transformers open. Needs the extra ``transformers``.

Nothing is unpickled but tensors, and no code of a checkpoint is run. ``conversion.py`` is the way of one checkpoint; it
reads tensors by ``stored_tensors.py``, finds their class by ``model_classes.py`` and their tokenizer by
``vocabulary_files.py``.
"""
