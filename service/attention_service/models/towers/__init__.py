"""Encoders of images and of texts that timm and OpenCLIP wrote, as the classes of transformers that compute them."""
