"""The door for clients of the Open Inference Protocol, version 2, over REST: those of Triton and KServe.

It imports ``api/handlers.py``, the modules and the runtime. Read ``v2_routes.py`` first.
"""
