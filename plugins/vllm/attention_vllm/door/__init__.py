"""The part of the plugin in the server of vLLM's API: requests and replies. Read ``attention_door.py`` first."""
