"""Conversations as a chat template writes them, the tokens of their named parts, and named pairs, without torch.

It imports the contract alone, so that the plugin of vLLM reads prompts as the whole models do. Read
``conversations.py`` first.
"""
