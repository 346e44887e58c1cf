"""Highlighted prompts as files to keep: an HTML page that needs nothing else, and an SVG picture."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from attention_contract.schemas.analyses.context import ContextReply
from attention_pictures.context.highlights import TITLES, PromptPiece, values_of, views, whole
from attention_pictures.sign_colours import NEGATIVE, POSITIVE, STRONGEST, background

_STYLE: Final = """
:root{color-scheme:light dark}
body{font:16px/1.6 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;overflow-wrap:break-word}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
mark{color:inherit;border-radius:.2em;padding:.08em 0}
table{border-collapse:collapse;margin:1.5rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}small{opacity:.75}
"""
_COLUMNS, _WIDTH, _LINE, _MARGIN = 96, 8.0, 22, 24
"""Characters of a line of the picture; the pixels of a character, of a line, and around all."""


def context_html(reply: ContextReply, measure: str) -> str:
    """Return a page with the prompt for each sentence of the answer, and a table of all measures."""
    title = f"Sources of an answer of {escape(reply.ran.model)}"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f"{context_body(reply, measure)}</body></html>\n"
    )


def context_body(reply: ContextReply, measure: str) -> str:
    """Return what stands in that page, for a notebook."""
    blocks = [
        f"<h2>{escape(view.heading)}</h2>\n<p style='white-space:pre-wrap'>{''.join(map(_mark, view.pieces))}</p>"
        for view in views(reply, measure)
    ]
    values = {name: whole(name, x) for name, x in values_of(reply).items()}
    head = "".join(f"<th>{escape(name)}</th>" for name in ("source", *values))
    rows = "".join(
        f"<tr><td>{escape(source.name)}</td>{''.join(f'<td>{x[at]:+.4g}</td>' for x in values.values())}</tr>"
        for at, source in enumerate(reply.sources)
    )
    numbers = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f"<p><small>{escape(TITLES[measure])}. Orange: the sentence needs the source; blue: it speaks against it. "
        f"The strongest source of each sentence has the strongest colour.</small></p>\n"
        + "\n".join(blocks)
        + f"\n<div style='overflow-x:auto'>{numbers}</div>"
    )


def context_svg(reply: ContextReply, measure: str) -> str:
    """Return a picture of the prompt for each sentence of the answer, in a font of one width."""
    shapes: list[str] = []
    top = _MARGIN
    for view in views(reply, measure):
        for heading in _wrapped([PromptPiece(view.heading)]):
            shapes.append(_text("".join(piece.text for piece in heading), 0, top, bold=True))
            top += _LINE
        for line in _wrapped(view.pieces):
            column = 0
            for piece in line:
                shapes += _shapes(piece, column, top)
                column += len(piece.text)
            top += _LINE
        top += _LINE
    shapes.append(_text(TITLES[measure], 0, top, faint=True))
    width, height = int(2 * _MARGIN + _COLUMNS * _WIDTH), top + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, DejaVu Sans Mono, monospace" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{"".join(shapes)}</svg>\n'
    )


def _mark(piece: PromptPiece) -> str:
    if piece.strength is None:
        return escape(piece.text)
    colour, note = background(piece.strength), escape(piece.note)
    return f"<mark style='background:{colour}' title='{note}'>{escape(piece.text)}</mark>"


def _shapes(piece: PromptPiece, column: int, top: int) -> Iterator[str]:
    if piece.strength is not None:
        x, width = _MARGIN + column * _WIDTH, len(piece.text) * _WIDTH
        yield (
            f'<rect x="{x:g}" y="{top - 15}" width="{width:g}" height="{_LINE - 2}" rx="2" '
            f'fill="rgb{POSITIVE if piece.strength >= 0 else NEGATIVE}" '
            f'fill-opacity="{abs(piece.strength) * STRONGEST:.3f}"><title>{escape(piece.note)}</title></rect>\n'
        )
    if piece.text.strip():
        yield _text(piece.text, column, top)


def _text(text: str, column: int, top: int, *, bold: bool = False, faint: bool = False) -> str:
    """A text whose characters have the picture's width, whatever font the viewer has."""
    more = (' font-weight="bold"' if bold else "") + (' fill="#666"' if faint else ' fill="#111"')
    return (
        f'<text x="{_MARGIN + column * _WIDTH:g}" y="{top}" xml:space="preserve"{more} '
        f'textLength="{len(text) * _WIDTH:g}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>\n'
    )


def _wrapped(pieces: Sequence[PromptPiece]) -> Iterator[list[PromptPiece]]:
    """The pieces line by line: broken at spaces if a line is full, and where the prompt is."""
    line: list[PromptPiece] = []
    used = 0
    for piece in pieces:
        for number, part in enumerate(piece.text.replace("\t", "    ").split("\n")):
            if number:
                yield line
                line, used = [], 0
            rest = part
            while used + len(rest) > _COLUMNS:
                space = rest.rfind(" ", 0, _COLUMNS - used + 1)
                cut = space + 1 if space >= 0 else 0 if used else _COLUMNS
                line.append(piece._replace(text=rest[:cut].rstrip() if cut else ""))
                yield line
                line, used, rest = [], 0, rest[cut:]
            if rest:
                line.append(piece._replace(text=rest))
                used += len(rest)
    if line:
        yield line
