"""The keys of attentions as tokens with labels: with compressed ones behind them, those of two texts, or windows."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.models.inputs.input_stacks import Span, Stack
from attention_service.models.inputs.patch_grids import Patch, Rectangle, patch_name
from attention_service.models.passes.layer_keys import Compression, LayerWindows


def extended(stack: Stack, compression: Compression) -> Stack:
    """Return the tokens, and behind them the keys that stand for several."""
    spans = compression.spans(stack.length)
    if not spans:
        return stack
    own = stack.ids.new_full((len(stack.ids), len(spans)), -1)
    mask = stack.mask
    if mask is not None:
        real = torch.stack([mask[:, span.start : span.stop].any(1) for span in spans], 1)
        mask = torch.cat([mask, real], 1)
    return replace(
        stack,
        ids=torch.cat([stack.ids, own], 1),
        mask=mask,
        spans=[[*row, *(_covered(row, span) for span in spans)] for row in stack.spans],
        patches=None if stack.patches is None else [[*row, *[None] * len(spans)] for row in stack.patches],
        compressed=spans,
    )


def _covered(row: list[Span], tokens: range) -> Span:
    """The characters of several tokens, from the first to the last."""
    known = [span for span in row[tokens.start : tokens.stop] if span is not None]
    return (known[0][0], known[-1][1]) if known else None


def joined(decoder: Stack, encoder: Stack) -> Stack:
    """Return the tokens of the decoder, and behind them those of the encoder."""
    mask = None
    if decoder.mask is not None or encoder.mask is not None:
        mask = torch.cat([_mask(decoder), _mask(encoder)], 1)
    names = None
    if decoder.names is not None and encoder.names is not None:
        names = [[*own, *read] for own, read in zip(decoder.names, encoder.names, strict=True)]
    return Stack(
        torch.cat([decoder.ids, encoder.ids], 1),
        mask,
        [[*own, *read] for own, read in zip(decoder.spans, encoder.spans, strict=True)],
        names,
        foreign=encoder.length,
    )


def in_windows(images: Stack, windows: LayerWindows) -> Stack:
    """Return the tokens of every window of every image: a batch of windows, those of the first image first."""
    windowed: list[list[Patch | None]] = []
    for row in images.patches or ():
        known = sorted((patch for patch in row if patch is not None), key=lambda patch: patch[2:4])
        tokens = _merged(known, windows)
        windowed += [[tokens[at] if at >= 0 else None for at in window] for window in windows.order.tolist()]
    ids = windows.order.repeat(len(images.ids), 1).to(images.ids.device)
    spans: list[list[Span]] = [[None] * ids.shape[1]] * len(ids)
    names = [["padding" if patch is None else patch_name(patch, len(images.ids)) for patch in row] for row in windowed]
    return Stack(ids, None, spans, names, windowed)


def _merged(patches: Sequence[Patch], windows: LayerWindows) -> list[Patch]:
    """The tokens of a layer, each of which is a square of patches."""
    if windows.merged == 1:
        return [*patches]
    squares: dict[tuple[int, int], list[Patch]] = {}
    for patch in patches:
        squares.setdefault((patch.row // windows.merged, patch.column // windows.merged), []).append(patch)
    return [
        Patch(square[0].image, square[0].crop, *at, _around([patch.rectangle for patch in square]))
        for at, square in squares.items()
    ]


def _around(rectangles: Sequence[Rectangle | None]) -> Rectangle | None:
    """The least rectangle around several, but for those of padding."""
    known = [rectangle for rectangle in rectangles if rectangle is not None]
    if not known:
        return None
    left, top, right, bottom = zip(*known, strict=True)
    return min(left), min(top), max(right), max(bottom)


def _mask(stack: Stack) -> Tensor:
    return torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
