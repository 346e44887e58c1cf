"""The door for clients of the Open Inference Protocol, version 2, over REST: those of Triton and KServe."""
