"""``method``: the decorator that makes a function into a method of both clients.

The function states a call: it takes the arguments and returns the call, or a flow of several calls. Its documentation
and its signature are those of the method, which sends the call.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from types import GenericAlias, NoneType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, get_args, overload

from attention_client.calls.base import Call, CallOptions, ReplyT
from attention_client.connection_settings import StreamSettings

P = ParamSpec("P")
WayT = TypeVar("WayT")
"""``Blocking`` or ``Awaited``."""
BlockingT = TypeVar("BlockingT")
AwaitedT = TypeVar("AwaitedT")
ResultT = TypeVar("ResultT")
Flow = Generator[Call[Any], Any, ResultT]
"""Several exchanges without I/O: yields calls, receives their replies, and returns a result.

A fault of a call is raised where the call was yielded.
"""


class Blocking:
    """The way of a client whose methods return their results."""


class Awaited:
    """The way of a client whose methods return awaitables of their results."""


class Calls(ABC, Generic[WayT]):
    """An object whose methods make calls: a client, a group of calls, or a session."""

    _awaits: bool = False
    """True if ``send`` returns an awaitable."""

    @abstractmethod
    def send(self, call: Call[Any]) -> Any:
        """Send a call and return its reply, or an awaitable of it."""

    def pieces(self, call: Call[Any]) -> Any:
        """Send a call whose reply comes in pieces; yields them, or is an async iterator of them."""
        raise NotImplementedError


class Sender(Calls[WayT]):
    """A client, which its groups of calls send by."""

    @abstractmethod
    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the streams that belong to this client."""


class Group(Calls[WayT]):
    """A group of a client's calls."""

    def __init__(self, client: Sender[WayT]) -> None:
        self._client = client
        self._awaits = client._awaits

    def send(self, call: Call[Any]) -> Any:
        """Send a call by the client."""
        return self._client.send(call)

    def pieces(self, call: Call[Any]) -> Any:
        """Send a call by the client, and yield the pieces of its reply."""
        return self._client.pieces(call)


class CallMethod(Generic[P, BlockingT, AwaitedT]):
    """A method that returns ``BlockingT`` where calls block and ``AwaitedT`` where they are awaited.

    Both functions show the documentation and the signature of the one that states the call, with the keywords of a
    TypedDict one by one. Each of them may be left out or None.
    """

    def __init__(
        self, stated: Callable[..., Any], blocking: Callable[..., BlockingT], awaited: Callable[..., AwaitedT]
    ) -> None:
        self.__doc__ = stated.__doc__
        self._blocking: Any = _shown(blocking, stated)
        self._awaited: Any = _shown(awaited, stated)

    @overload
    def __get__(self, instance: Calls[Blocking], owner: Any) -> Callable[P, BlockingT]: ...
    @overload
    def __get__(self, instance: Calls[Awaited], owner: Any) -> Callable[P, AwaitedT]: ...
    @overload
    def __get__(self, instance: None, owner: type[Calls[Blocking]]) -> Callable[Concatenate[Any, P], BlockingT]: ...
    @overload
    def __get__(self, instance: None, owner: type[Calls[Awaited]]) -> Callable[Concatenate[Any, P], AwaitedT]: ...
    def __get__(self, instance: Calls[Any] | None, owner: type[Calls[Any]]) -> Any:
        function = self._awaited if (owner if instance is None else instance)._awaits else self._blocking
        return function.__get__(instance, owner)


@overload
def method(
    stated: Callable[Concatenate[Any, P], Call[ReplyT]],
) -> CallMethod[P, ReplyT, Coroutine[Any, Any, ReplyT]]: ...
@overload
def method(
    stated: Callable[Concatenate[Any, P], Flow[ResultT]],
) -> CallMethod[P, ResultT, Coroutine[Any, Any, ResultT]]: ...
def method(stated: Callable[..., Any]) -> CallMethod[..., Any, Any]:
    """Make a method of both clients from a function of its arguments, which returns a call or a flow of calls."""

    def blocking(self: Calls[Blocking], *args: Any, **kwargs: Any) -> Any:
        return run(stated(self, *args, **kwargs), self.send)

    async def awaited(self: Calls[Awaited], *args: Any, **kwargs: Any) -> Any:
        return await run_awaited(stated(self, *args, **kwargs), self.send)

    return CallMethod(stated, blocking, awaited)


def streamed(
    stated: Callable[Concatenate[Any, P], Call[ReplyT]],
) -> CallMethod[P, Iterator[ReplyT], AsyncIterator[ReplyT]]:
    """Make a method of both clients from a function that returns a call whose reply comes in pieces.

    The blocking one returns an iterator, and the awaited one an async iterator.
    """

    def blocking(self: Calls[Blocking], *args: Any, **kwargs: Any) -> Any:
        return self.pieces(stated(self, *args, **kwargs))

    def awaited(self: Calls[Awaited], *args: Any, **kwargs: Any) -> Any:
        return self.pieces(stated(self, *args, **kwargs))

    pieces = get_args(signature(stated).return_annotation)
    blocking.__annotations__["return"] = GenericAlias(Iterator, pieces)
    awaited.__annotations__["return"] = GenericAlias(AsyncIterator, pieces)
    return CallMethod(stated, blocking, awaited)


def _shown(function: Callable[..., Any], stated: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the documentation and the whole signature of the one that states the call."""
    about = signature(stated)
    parameters: list[Parameter] = []
    for parameter in about.parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            (fields,) = get_args(parameter.annotation)
            parameters += [
                Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in fields.__annotations__.items()
                if name not in CallOptions.__annotations__
            ]
            parameter = parameter.replace(annotation=Unpack[CallOptions])  # noqa: PLW2901
        parameters.append(parameter)
    reply = function.__annotations__["return"]
    if reply is Any:
        reply = get_args(about.return_annotation)[-1]
    update_wrapper(function, stated)
    whole = Signature(parameters, return_annotation=None if reply is NoneType else reply)
    function.__dict__["__signature__"] = whole
    function.__annotations__ = {name: shown.annotation for name, shown in whole.parameters.items() if name != "self"}
    function.__annotations__["return"] = whole.return_annotation
    return function


def run(call_or_flow: Call[Any] | Flow[ResultT], send: Callable[[Call[Any]], Any]) -> Any:
    """Send a call, or all calls of a flow, and return the result."""
    if isinstance(call_or_flow, Call):
        return send(call_or_flow)
    try:
        call = next(call_or_flow)
        while True:
            try:
                reply = send(call)
            except BaseException as fault:  # the flow may have something to undo
                call = call_or_flow.throw(fault)
            else:
                call = call_or_flow.send(reply)
    except StopIteration as end:
        return end.value


async def run_awaited(call_or_flow: Call[Any] | Flow[ResultT], send: Callable[[Call[Any]], Awaitable[Any]]) -> Any:
    """Send a call, or all calls of a flow, and return the result."""
    if isinstance(call_or_flow, Call):
        return await send(call_or_flow)
    try:
        call = next(call_or_flow)
        while True:
            try:
                reply = await send(call)
            except BaseException as fault:
                call = call_or_flow.throw(fault)
            else:
                call = call_or_flow.send(reply)
    except StopIteration as end:
        return end.value
