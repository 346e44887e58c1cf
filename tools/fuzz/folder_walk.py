"""Damaged folders: every reader of their files answers, or refuses them with an error that names a file or an entry.

A fault names its form, file and damage: ``python -m tools.fuzz --form "gguf llama" --folders 1000000`` asks about every
damage of a form.
"""

import os
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.json_writing import to_json
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders.model_catalogue import all_with_adapters, find_folder, listed
from attention_service.modules.checkpoints import catalogue
from attention_service.modules.checkpoints.import_plan import plan
from tools.fuzz.damaged_values import Damage
from tools.fuzz.folder_forms import ADAPTER, FORMS, NAME, damages_of, write_sound
from tools.fuzz.targets import refused

Said = Mapping[str, str]
"""The answer to each question: ``answered``, ``refused: …`` or ``FAULT …``."""
Ask = Callable[[Path], Said]
"""Asks about the folders of a repository."""
FAULT: Final = "FAULT"
SECONDS: Final = 10.0
"""The longest time of one answer."""


def _imported(root: Path) -> Any:
    """The import of a layer, with the adapter where there is one."""
    request = ImportModule(checkpoint=NAME, adapter=ADAPTER if (root / ADAPTER).is_dir() else None)
    try:
        found = plan(root, request)
    except InvalidRequest as error:  # which says what to choose among
        if "stacks" not in error.facts:
            raise
        found = plan(root, request.model_copy(update={"stack": error.facts["stacks"][0]}))
    found.read()
    return [found.config, found.source]


QUESTIONS: Final[dict[str, Callable[[Path], Any]]] = {
    "GET /v1/checkpoints": catalogue.listed,
    f"GET /v1/checkpoints/{NAME}": lambda root: catalogue.described(root, NAME),
    "GET /v1/models": lambda root: all_with_adapters(root, listed(root), {}),
    f"GET /v1/models/{NAME}": lambda root: find_folder(root, NAME).info(NAME, None),
    "POST /v1/modules/import": _imported,
}
"""What reads a folder without loading it whole, by the request that asks."""


@dataclass
class FolderOutcome:
    """Counts of a walk, and its faults as text."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def ask_readers(root: Path) -> Said:
    """Ask every question about the folders of a repository, in this process."""
    return {question: said_of(lambda ask=ask: to_json(ask(root))) for question, ask in QUESTIONS.items()}  # type: ignore[misc]


def said_of(answer: Callable[[], Any]) -> str:
    """Ask one question."""
    began = time.monotonic()
    try:
        answer()
        said = "answered"
    except AttentionError as error:
        try:
            refused(error)
            to_json(error.to_problem())
            said = f"refused: {error.detail}"
        except Exception as fault:
            said = f"{FAULT} {fault}"
    except BaseException as fault:
        said = f"{FAULT} {type(fault).__name__}\n" + "".join(traceback.format_exception(fault))
    seconds = time.monotonic() - began
    return said if seconds < SECONDS else f"{FAULT} it took {seconds:.0f} s"


def walk_folders(ask: Ask, count: int, seed: int, forms: Sequence[str] = tuple(FORMS)) -> FolderOutcome:
    """Ask about so many damages, of each form as many. The same seed draws the same."""
    outcome = FolderOutcome()
    for number, form in enumerate(forms):
        share = count // len(forms) + (number < count % len(forms))
        with tempfile.TemporaryDirectory() as place:
            root = Path(place).resolve()
            files = write_sound(root, form)
            sound = ask(root)
            for file, damage in _damaged(files, f"{seed} {form}", share):
                _note(ask(root), sound, f"{form}: {file.name}", damage, outcome)
    return outcome


def _damaged(files: Sequence[Path], seed: str, count: int) -> Iterator[tuple[Path, Damage]]:
    """Damage files in one way after the other: in every way, or so many times one of the files in one way."""
    ways = {file: [*damages_of(file)] for file in files}
    every = [(file, damage) for file, damages in ways.items() for damage in damages]
    rng = random.Random(seed)
    drawn = ((file, rng.choice(ways[file])) for file in rng.choices(files, k=count))
    for at, (file, damage) in enumerate(every if count >= len(every) else drawn):
        sound = file.read_bytes()
        file.write_bytes(damage.content())
        os.utime(file, ns=(at, at))  # headers are remembered by time and size
        yield file, damage
        file.write_bytes(sound)


def _note(said: Said, sound: Said, place: str, damage: Damage, outcome: FolderOutcome) -> None:
    """Count what was said. A request about files that the sound folder was not refused is refused by a name."""
    keys = (part.rpartition(".")[2] for part in damage.place if not part.isdecimal())
    # What one file says and another does not hold is named by either, or by the tensor.
    names = {place.partition(": ")[2], "config.json", ".weight", ".bias", "_weight", NAME, ADAPTER, *keys}
    for question, words in said.items():
        kind = words.partition(":")[0].split()[0]
        by_name = any(name in words for name in names) or " /v1/" not in question
        nameless = kind == "refused" and sound[question] == "answered" and not by_name
        outcome.counts[FAULT if nameless else kind] += 1
        if nameless or kind == FAULT:
            why = ", which names neither the file nor the entry" if nameless else ""
            where = f"{place} {'.'.join(damage.place)[:200]} {damage.made}, {question}"
            outcome.faults.append(f"{where}{why}: {words}")
