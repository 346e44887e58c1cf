"""``attention sessions``."""

from typing import Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from attention_client.cli import completion, display, tensor_arguments
from attention_client.cli.display import print_out, scaled
from attention_client.cli.invocation import AsJson, client_of, present
from attention_contract.schemas.sessions import SessionInfo, SessionList

app = typer.Typer(help="List, open, show and end the decode sessions of a server.", rich_markup_mode="rich")
Id = Annotated[str, typer.Argument(metavar="ID", help="A session.")]
File = Annotated[str | None, typer.Option(metavar="FILE", help="Begin with these: .npy, .npz, .safetensors, .json.")]


@app.callback(invoke_without_command=True)
def sessions(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List, open, show and end the decode sessions of a server."""
    if ctx.invoked_subcommand is None:
        every(ctx, as_json)


@app.command("list")
def every(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every session below the one that it was forked from, with its shared and its own memory."""
    with client_of(ctx) as client:
        reply = client.sessions.list()
    present(reply, as_json, _tree)


@app.command("show")
def one(ctx: typer.Context, id: Id, as_json: AsJson = False) -> None:  # noqa: A002
    """Show module, length, memory and expiry of one session."""
    with client_of(ctx) as client:
        reply = client.sessions.get(id)
    present(reply, as_json, display.facts)


@app.command("open")
def begin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=completion.modules, help="A resident module.")],
    sequences: Annotated[int | None, typer.Option(help="Sequences; default: 1, or those of the past.")] = None,
    capacity: Annotated[int | None, typer.Option(help="Reserve memory for so many tokens.")] = None,
    ttl_s: Annotated[float | None, typer.Option(help="Seconds without a request after which it expires.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help='As in {"name": "window_sinks", "window": 1024}.')
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never evict it for another session's memory.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Hold equal prefixes of sessions once.")] = False,
    version: Annotated[str | None, typer.Option(help="Open only if the module is at this version.")] = None,
    source: Annotated[str | None, typer.Option("--from", metavar="ID", help="Begin with this session's past.")] = None,
    past_key: File = None,
    past_value: File = None,
    as_json: AsJson = False,
) -> None:
    """Open a session of a module and print its id."""
    past: dict[str, Any] = {
        field: tensor_arguments.read(file, field)
        for field, file in (("past_key", past_key), ("past_value", past_value))
        if file is not None
    }
    with client_of(ctx) as client:
        reply = client.sessions.create(
            name, sequences=sequences, capacity=capacity, ttl_s=ttl_s, pinned=pinned, share=share, version=version,
            policy=None if policy is None else tensor_arguments.read_object(policy, "policy"),
            from_=None if source is None else {"session": source}, **past,
        )  # fmt: skip
    present(reply, as_json, display.facts)


@app.command()
def delete(ctx: typer.Context, id: Id) -> None:  # noqa: A002
    """End a session and free its memory."""
    with client_of(ctx) as client:
        client.sessions.delete(id)
    typer.echo(f"deleted {id}")


def _tree(reply: SessionList) -> None:
    """Print the sessions of each module as a tree of forks."""
    known = {each.session for each in reply.sessions}
    modules: dict[str, Tree] = {}
    nodes: dict[str, Tree] = {}
    for each in _parents_first(reply.sessions):
        above = nodes[each.parent] if each.parent in known and each.parent in nodes else None
        if above is None:
            above = modules.setdefault(each.module, Tree(Text(each.module, style="bold")))
        nodes[each.session] = above.add(Text(_line(each)))
    for tree in modules.values():
        print_out(tree)
    total = (
        f"{reply.pages} pages of {reply.page_tokens} tokens, {reply.shared_pages} shared; {scaled(reply.bytes, 'B')}"
    )
    print_out(Text(f"{len(reply.sessions)} sessions; {total}", style="dim"))


def _parents_first(sessions: list[SessionInfo]) -> list[SessionInfo]:
    parents = {each.session: each.parent for each in sessions}

    def depth(session: str | None) -> int:
        count = 0
        while session in parents:
            session, count = parents[session], count + 1
        return count

    return sorted(sessions, key=lambda each: depth(each.session))


def _line(each: SessionInfo) -> str:
    size = f"{each.sequences} × {each.length} tokens" if each.sequences > 1 else f"{each.length} tokens"
    held = "" if each.held == each.length else f", {each.held} held"
    memory = f"{scaled(each.own_bytes, 'B')} own, {scaled(each.shared_bytes, 'B')} shared"
    return f"{each.session}  {size}{held}  {memory}{'  pinned' if each.pinned else ''}"
