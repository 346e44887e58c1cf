"""Every call of the service, stated once: the arguments and documentation of a method, and the request they become."""

from attention_client.calls.base import Call, CallOptions, HttpMessage, MediaType, ReplyT, call, sized

__all__ = ["Call", "CallOptions", "HttpMessage", "MediaType", "ReplyT", "call", "sized"]
