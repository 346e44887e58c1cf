"""The heads of models, by the names of their classes in transformers: what each predicts, and for which part of a text.

A class that is not named here is loaded without a head.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from attention_service.modules.checkpoints.json_objects import index_of

Predicts = Literal["next", "own", "class"]
"""``next``: the following token; ``own``: the token in its place; ``class``: one of some classes."""
Unit = Literal["token", "input", "span", "choice", "object"]
"""The part of an input that has one prediction: each token; the whole; each token as the first or last of an answer;
several texts, of which one is chosen; each object that a detector looks for in an image."""

LISTED_CLASSES: Final = 1000
"""Classes that the description of a model names."""
LISTED_TENSORS: Final = 100
"""The same of tensors that it leaves out."""


class HeadKind(NamedTuple):
    """One kind of heads."""

    predicts: Predicts
    unit: Unit = "token"
    exclusive: bool = True
    """True for a softmax with a "no object" class, False for independent sigmoids."""


_KINDS: Final = {
    **dict.fromkeys(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForTextToText", "MarianMTModel",
         "EncoderDecoderModel", "BertGenerationDecoder"), HeadKind("next"),
    ),
    **dict.fromkeys(("ForMaskedLM", "ForCTC"), HeadKind("own")),
    **dict.fromkeys(
        ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification",
         "ForAudioClassification"),
        HeadKind("class", "input"),
    ),
    "ForTokenClassification": HeadKind("class"),
    **dict.fromkeys(("ForQuestionAnswering", "ForQuestionAnsweringSimple"), HeadKind("class", "span")),
    "ForMultipleChoice": HeadKind("class", "choice"),
}  # fmt: skip
"""The kind of each end of a class name."""
_OF_OBJECTS: Final = {
    **dict.fromkeys(
        ("DetrForObjectDetection", "TableTransformerForObjectDetection", "YolosForObjectDetection"),
        HeadKind("class", "object"),
    ),
    **dict.fromkeys(
        ("ConditionalDetrForObjectDetection", "DabDetrForObjectDetection", "RTDetrForObjectDetection",
         "RTDetrV2ForObjectDetection", "DFineForObjectDetection"),
        HeadKind("class", "object", exclusive=False),
    ),
}  # fmt: skip
"""The kinds of detectors, by the names of their classes."""
NO_OBJECT: Final = "no object"
"""The last class of a head whose classes exclude each other, for an object that is none."""
_OTHERS: Final = frozenset({
    "FlaubertForQuestionAnswering", "TapasForQuestionAnswering", "ViltForQuestionAnswering",
    "LxmertForQuestionAnswering", "XLMForQuestionAnswering", "XLNetForQuestionAnswering",
})  # fmt: skip
"""Classes whose answers are found by a search over spans, or are cells of a table or answers of a list."""


def head_kind(name: str) -> HeadKind | None:
    """The kind of the head of a class; None for a class without one that predicts."""
    if name in _OTHERS:
        return None
    ends = (kind for end, kind in _KINDS.items() if name.endswith(end))
    return _OF_OBJECTS.get(name) or next(ends, None)


def class_names(kind: HeadKind | None, id2label: Any) -> tuple[str, ...]:
    """The names of the classes of a head, by the entry of its config; none if it chooses one of several texts."""
    if kind is None or kind.predicts != "class" or kind.unit == "choice":
        return ()
    if kind.unit == "span":
        return ("start", "end")
    names: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # which transformers takes and does not write
    if isinstance(id2label, Mapping):
        numbered = {at: str(name) for class_id, name in id2label.items() if (at := index_of(str(class_id))) is not None}
        names = tuple(numbered[class_id] for class_id in sorted(numbered))
    return (*names, NO_OBJECT) if kind.unit == "object" and kind.exclusive else names
