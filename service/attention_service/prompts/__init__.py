"""Conversations as a chat template writes them, and the tokens of their named parts, without torch.

It imports the contract alone, so that the plugin of vLLM reads prompts as the whole models do. Read
``conversations.py`` first.
"""
