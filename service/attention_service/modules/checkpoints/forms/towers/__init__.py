"""Encoders of images and of texts that timm and OpenCLIP wrote, as the classes of transformers that compute them.

It imports ``form.py`` of the forms, and ``json_objects.py`` of ``checkpoints``. Read ``tower_forms.py`` first.
"""
