"""Stock clients of the Open Inference Protocol, in an environment of their own, against a live server."""
