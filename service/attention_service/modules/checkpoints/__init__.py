"""Checkpoints in the model repository: their files, the layouts of their families, and the import of one layer.

It imports the core and ``modules/store_files.py``. Read ``checkpoint_files.py`` first.
"""
