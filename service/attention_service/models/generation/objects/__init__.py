"""Objects of OpenAI's API: tokens as chunks of a stream, or as one object of all.

It imports ``decoding``, and the rooms below ``generation``. Read ``completion_objects.py`` first.
"""
