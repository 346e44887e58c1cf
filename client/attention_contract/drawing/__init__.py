"""Replies drawn by matplotlib: one file a kind of picture. Needs the extra ``plot``; nothing else here imports it."""

from attention_contract.drawing.figure_style import styled
from attention_contract.drawing.picture_files import draw, facts_of, make_figure, media_type_of, save, saving_bytes
from attention_contract.reply_names import Names
from attention_contract.request_names import names_of

__all__ = ["Names", "draw", "facts_of", "make_figure", "media_type_of", "names_of", "save", "saving_bytes", "styled"]
