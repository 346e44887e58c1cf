"""Forms in which weights are quantized: the tensors of each, and the float numbers that they stand for.

It imports ``form.py`` of the forms, and ``json_objects.py`` of ``checkpoints``. Read ``quantized_form.py`` first.
"""
