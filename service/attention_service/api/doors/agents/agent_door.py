"""The door at ``/mcp``: the Model Context Protocol by its official package, stateless over streamable HTTP.

The package speaks the protocol of 2026-07-28, and that of 2025-11-25 and before with its ``initialize``. The tools ask
this application (``own_requests``). Access is that of every path, and the access layer counts a message as a request.
"""

import base64
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    ResourceTemplate,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic.json_schema import GenerateJsonSchema
from sse_starlette.sse import AppStatus
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from attention_contract.errors import AttentionError, InternalError, InvalidRequest
from attention_contract.operations import model_forward
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS
from attention_service import __version__
from attention_service.api.doors.agents import error_advice
from attention_service.api.doors.agents.agent_tool import AgentTool, ToolContext
from attention_service.api.doors.agents.array_addresses import TEMPLATE, address_of
from attention_service.api.doors.agents.opened_inputs import OpenedInputs
from attention_service.api.doors.agents.own_requests import PATH, OwnRequests
from attention_service.api.doors.agents.tools import (
    compare_inputs,
    effect_of_edit,
    estimate_cost,
    explain_weight,
    gradient_of_prediction,
    look_at_head,
    open_input,
    rank_heads,
)
from attention_service.api.handlers import unexpected
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.budget import BodyMemory

TOOLS: Final[Sequence[AgentTool[Any]]] = tuple(
    module.TOOL
    for module in (
        open_input,
        rank_heads,
        look_at_head,
        effect_of_edit,
        gradient_of_prediction,
        estimate_cost,
        compare_inputs,
        explain_weight,
    )
)
"""The tools, in the order in which an agent reads them."""
_INSTRUCTIONS: Final = (
    "Tools to look into the attention of transformer models, to change it, and to price it. Begin with open_input, "
    "which gives a handle for a text or an image, and give that to the other tools. rank_heads finds heads, "
    "look_at_head and explain_weight show one, effect_of_edit and gradient_of_prediction tell what a prediction "
    "depends on. Ask concise first. Positions, layers and heads count from 0."
)
_CALL: Final = "attention.call"
"""The entry of the ASGI scope of a message with what its tool uses."""
_FRESH: Final = CacheHint(ttl_ms=3_600_000, scope="public")
"""Lists are the same for every caller until the server is another version."""
_PARTS_OF_ADDRESS: Final = {"layers": "uri", "select.heads": "uri"}
"""The fields of a request that an address becomes."""
_MAX_MESSAGE: Final = 2**24
"""Bytes of one message, an image in base64 among them."""
_MAX_ARRAY: Final = 2**24
"""Bytes of one array that is read as a resource, whose base64 an agent's client holds."""


class _Untitled(GenerateJsonSchema):
    """Schemas without a title for each field, which repeats its name and costs an agent tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave the titles of fields out."""
        return False


class AgentDoor:
    """The ASGI application at ``/mcp``."""

    def __init__(self, app: FastAPI) -> None:
        """``app``: the whole application, which the tools ask."""
        # A server that stops lets every answer end; by default this library cuts those of clients of 2025-11-25.
        AppStatus.enable_automatic_graceful_drain = False
        logging.getLogger("mcp").setLevel(logging.WARNING)  # the log of requests has a line for each message
        self._app = app
        self._tools = {tool.name: tool for tool in TOOLS}
        self._schemas: dict[str, dict[str, Any]] = {
            tool.name: tool.arguments.model_json_schema(schema_generator=_Untitled) for tool in TOOLS
        }
        self._server: Server[Any] = Server(
            "attention-service",
            title="Attention service",
            version=__version__,
            instructions=_INSTRUCTIONS,
            cache_hints={"tools/list": _FRESH, "resources/list": _FRESH, "resources/templates/list": _FRESH},
            get_tool_input_schema=self._schemas.get,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        self._listed = [_described(tool, self._schemas[tool.name]) for tool in TOOLS]
        self._sessions: StreamableHTTPSessionManager | None = None
        self._inputs: OpenedInputs | None = None
        self._route = Route(PATH, self, methods=["POST"], name="mcp", include_in_schema=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer messages while the block runs."""
        sessions = StreamableHTTPSessionManager(self._server, stateless=True, max_request_body_size=_MAX_MESSAGE)
        async with sessions.run():
            self._sessions, self._inputs = sessions, OpenedInputs(self._app.state.engine.host)
            yield
        self._sessions = self._inputs = None

    def route(self) -> Route:
        """Return the route. A stateless server has no streams of its own, so there is no GET, and no DELETE."""
        return self._route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message."""
        if self._sessions is None or self._inputs is None:
            raise RuntimeError("the application does not run")
        scope["route"] = self._route  # by whose name the log and the metrics tell of it
        scope[_CALL] = ToolContext(OwnRequests(self._app, scope), self._inputs, caller.get().name)
        memory = BodyMemory(scope["app"].state.engine.host)

        async def counted() -> Message:
            message = await receive()
            memory.hold(len(message.get("body", b"")))
            return message

        try:
            await self._sessions.handle_request(scope, counted, send)
        finally:
            memory.give_back()

    async def _list_tools(
        self, _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=self._listed)

    async def _call_tool(
        self, context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        tool = self._tools.get(params.name)
        if tool is None:
            raise MCPError(
                INVALID_PARAMS, f"there is no tool {params.name[:80]!r}; call one of {', '.join(self._tools)}"
            )
        try:
            arguments = validate(tool.arguments, params.arguments or {}, by_name=False)
            return (await tool.run(_call_of(context), arguments)).result()
        except AttentionError as error:
            refused = error
        except Exception as fault:
            refused = unexpected(f"{PATH} {tool.name}", fault)
        explanation = error_advice.explanation(refused, tool.arguments_of)
        return CallToolResult(content=[TextContent(text=explanation)], is_error=True)

    async def _list_resources(
        self, _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        """None: arrays belong to inputs, and answers link to them."""
        return ListResourcesResult(resources=[])

    async def _list_templates(
        self, _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        description = "One array of one head over an open input, as a safetensors file; answers of tools link to them."
        return ListResourceTemplatesResult(
            resource_templates=[
                ResourceTemplate(uri_template=TEMPLATE, name="array", description=description, mime_type=SAFETENSORS)
            ]
        )

    async def _read_resource(
        self, context: ServerRequestContext[Any, Any], params: ReadResourceRequestParams
    ) -> ReadResourceResult:
        try:
            uri = str(params.uri)
            address, call = address_of(uri), _call_of(context)
            opened = call.input(address.input, "uri")
            array = await call.requests.fetch(model_forward, opened.fields | address.fields, model=opened.model)
            if len(array) > _MAX_ARRAY:
                raise InvalidRequest.at(
                    "uri",
                    f"the array has {len(array):,} bytes, and a resource at most {_MAX_ARRAY:,}. Call look_at_head for "
                    "the rows that matter, or POST /v1/models/{model}/forward with select for a part of it",
                )
        except AttentionError as error:
            code = INTERNAL_ERROR if isinstance(error, InternalError) else INVALID_PARAMS
            explanation = error_advice.explanation(error, _PARTS_OF_ADDRESS)
            raise MCPError(code, explanation, {"uri": str(params.uri), "code": error.code}) from None
        blob = BlobResourceContents(uri=params.uri, mime_type=SAFETENSORS, blob=base64.b64encode(array).decode())
        return ReadResourceResult(contents=[blob])


def _call_of(context: ServerRequestContext[Any, Any]) -> ToolContext:
    message: Any = context.request
    call: ToolContext = message.scope[_CALL]
    return call


def _described(tool: AgentTool[Any], schema: dict[str, Any]) -> Tool:
    hints = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    return Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=schema,
        output_schema=tool.answer.model_json_schema(mode="serialization", schema_generator=_Untitled),
        annotations=hints,
    )
