"""The options of the commands that draw: ``--plot FILE`` and the look of the picture."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from attention_client import Client
from attention_contract.schemas.picture_options import PictureOptions, Scale, Theme, View
from attention_contract.validation import validate
from attention_contract.wire import PICTURES


@dataclass(frozen=True)
class PlotFile:
    """A file to draw into, and the look of the picture."""

    path: Path
    look: dict[str, Any]

    def write(self, client: Client, call: Callable[[Client], object]) -> None:
        """Write the picture of the reply of a call; the suffix of the file states the format."""
        ending: Any = self.path.suffix[1:].lower()
        picture = client.plot(ending, **self.look).of(call, client)
        self.path.write_bytes(picture.data)
        typer.echo(f"{self.path}: {len(picture.data)} bytes")


def _drawable(path: Path | None) -> Path | None:
    """Check the path to draw to before anything runs. An option's callback."""
    endings = [f".{ending}" for ending in PICTURES.values()]
    if path is not None and path.suffix.lower() not in endings:
        raise typer.BadParameter(f"expected a file that ends in {' or '.join(endings)}, got {path.name}")
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def _named(kind: Any) -> str:
    return ", ".join(get_args(kind))


def _plot_file(
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", "--picture", metavar="FILE", callback=_drawable, help="Draw into a .svg, .png or .pdf instead."
        ),
    ] = None,
    view: Annotated[str | None, typer.Option(help=f"With --plot: of {_named(View)}, one that the reply has.")] = None,
    theme: Annotated[str | None, typer.Option(help=f"With --plot: {_named(Theme)}.")] = None,
    palette: Annotated[
        str | None, typer.Option(help="With --plot: viridis, cividis, magma, …; of differences rdbu, puor, …")
    ] = None,
    width: Annotated[int | None, typer.Option(metavar="PIXELS", help="With --plot: the width of the picture.")] = None,
    dpi: Annotated[int | None, typer.Option(help="With --plot: pixels an inch, which sets the size of text.")] = None,
    scale: Annotated[str | None, typer.Option(help=f"With --plot: colours {_named(Scale)}.")] = None,
) -> PlotFile | None:
    """Return the file to draw into, its look checked. Raises InvalidRequest, which names the option at fault."""
    given = {"view": view, "theme": theme, "palette": palette, "width": width, "dpi": dpi, "scale": scale}
    look = {name: value for name, value in given.items() if value is not None}
    if plot is None:
        if look:
            raise typer.BadParameter(
                "it states the look of a picture; add --plot FILE", param_hint=f"--{next(iter(look))}"
            )
        return None
    validate(PictureOptions, look)
    return PlotFile(plot, look)


def takes_plot(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of pictures to a command; its argument ``plot_file`` is the result of ``_plot_file``."""
    shared = inspect.signature(_plot_file).parameters
    parameters = inspect.signature(command).parameters.values()
    own = [parameter for parameter in parameters if parameter.name != "plot_file"]

    def merged(*args: Any, **given: Any) -> None:
        look = _plot_file(**{name: given.pop(name) for name in shared})
        command(*args, plot_file=look, **given)

    hints = get_type_hints(command, include_extras=True) | get_type_hints(_plot_file, include_extras=True)
    every = [
        *own, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shared.values()),
    ]  # fmt: skip
    every = [every[0], *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in every[1:])]
    merged.__name__, merged.__doc__ = command.__name__, command.__doc__
    merged.__annotations__ = {parameter.name: hints[parameter.name] for parameter in every}
    merged.__dict__["__signature__"] = inspect.Signature(every)
    return merged
