"""Forms of checkpoints: what the files of each are to a model, as transformers would have written them.

It imports ``family.py`` and ``json_objects.py`` of ``checkpoints``. Read ``form.py`` first.
"""

from collections.abc import Sequence
from typing import Final

from attention_service.modules.checkpoints.forms.form import FormReader
from attention_service.modules.checkpoints.forms.gguf.gguf_form import GGUF_FILE
from attention_service.modules.checkpoints.forms.quantized.quantized_tensors import QUANTIZED
from attention_service.modules.checkpoints.forms.safetensors_form import SAFETENSORS
from attention_service.modules.checkpoints.forms.towers.tower_forms import OPENCLIP, TIMM

FORMS: Final[Sequence[FormReader]] = (GGUF_FILE, OPENCLIP, TIMM, QUANTIZED, SAFETENSORS)
"""The readers of all forms. The first that returns a form reads a checkpoint; the last reads any."""
