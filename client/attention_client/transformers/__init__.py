"""Attention of ``transformers`` models on the service. Needs the extra ``transformers``.

``attach`` runs the attention of a model on a server, records what happens inside it and edits it. ``register`` gives
the service a name that ``from_pretrained(…, attn_implementation=name)`` takes. ``SessionCache`` keeps the past of a
generation on the server.
"""

from attention_client.transformers.attached import Attached, attach
from attention_client.transformers.interface import register
from attention_client.transformers.session_cache import SessionCache
from attention_transformers.model_layers import LayerKey, UnsupportedModel

__all__ = ["Attached", "LayerKey", "SessionCache", "UnsupportedModel", "attach", "register"]
