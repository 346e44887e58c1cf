"""Replies drawn by matplotlib: one file a kind of picture. Needs the extra ``plot``; nothing else here imports it."""

from attention_contract.reply_names import Names
from attention_contract.request_names import names_of
from attention_pictures.figure_style import styled
from attention_pictures.image_maps import making_bytes
from attention_pictures.picture_files import draw, draw_layers, facts_of, make_figure, media_type_of, save, saving_bytes

__all__ = [
    "Names",
    "draw",
    "draw_layers",
    "facts_of",
    "make_figure",
    "making_bytes",
    "media_type_of",
    "names_of",
    "save",
    "saving_bytes",
    "styled",
]
