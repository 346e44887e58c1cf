"""Every call of the service, stated once: the arguments and documentation of a method, and the request they become."""

from attention_client.calls.base import Call, CallOptions, MediaType, Message, ReplyT, call, sized

__all__ = ["Call", "CallOptions", "MediaType", "Message", "ReplyT", "call", "sized"]
