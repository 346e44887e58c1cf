"""Write the text that the tiny model learns from: short English stories, made by a grammar.

No text of anybody else is used, so that the model and its data may be redistributed under this project's licence.
Each kind of document teaches something that attention can be seen to do: repeat what came before (induction), find the
other of two names (Wang et al. 2022), choose the pronoun of a name, and answer a question from what was told.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Final

WOMEN: Final = "Anna Clara Emma Grace Iris Kate Mary Nora Rosa Vera".split()
MEN: Final = "Ben David Felix Henry Jack John Leo Oscar Paul Tom".split()
BEINGS: Final = "bear bird boy cat dog duck farmer fox frog girl horse king mouse queen rabbit teacher".split()
THINGS: Final = "apple ball bell book box coin cup flower hat key lamp letter".split()
COLOURS: Final = "black blue brown green grey red white yellow".split()
KINDS: Final = "big little new old small young".split()
SURFACES: Final = "bed bench chair mat rock roof rug table wall".split()
ROOMS: Final = "barn forest garden house kitchen park river school shop town".split()
RESTS: Final = "lay sat slept stood".split()
MOVES: Final = "came ran walked went".split()
GETS: Final = "bought found lost saw took".split()
NUMBERS: Final = "one two three four five six seven eight nine ten".split()
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_SYLLABLES: Final = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
QUESTION: Final = "<|user|>"
ANSWER: Final = "<|assistant|>"
END: Final = "<|end|>"
"""The marks of a conversation; ``END`` ends each of its messages, and every document."""


def _made_up(random: Random) -> str:
    """Return a name that no other document has, such as ``Tamiro``, which can only be copied."""
    return "".join(random.choice(_SYLLABLES) for _ in range(random.randint(2, 3))).capitalize()


def _name(random: Random) -> str:
    return _made_up(random) if random.random() < 0.25 else random.choice(WOMEN + MEN)


def _names(random: Random, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        names += [name for name in [_name(random)] if name not in names]
    return names


def _noun(random: Random, nouns: list[str]) -> str:
    """Return a noun, half of the time with an adjective."""
    chosen = random.choice(nouns)
    return f"{random.choice(COLOURS + KINDS)} {chosen}" if random.random() < 0.5 else chosen


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _place(random: Random) -> str:
    return f"on the {random.choice(SURFACES)}" if random.random() < 0.5 else f"in the {random.choice(ROOMS)}"


def _who(random: Random) -> str:
    return f"the {_noun(random, BEINGS)}" if random.random() < 0.6 else _name(random)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


class _Fact:
    """Something that a story tells of somebody, in several ways, with a question about it."""

    def __init__(self, random: Random, who: str) -> None:
        kind = random.randrange(3)
        if kind == 0:
            place = _place(random)
            self.tellings = [f"{who} {rest} {place}" for rest in RESTS] + [f"{who} is {place}", f"{who} was {place}"]
            self.question, self.answer = f"Where is {who}?", f"{who} is {place}"
        elif kind == 1:
            thing = _a(_noun(random, THINGS))
            self.tellings = [f"{who} {has} {thing}" for has in ("has", "had", "bought", "found", "took")]
            self.question, self.answer = f"What does {who} have?", f"{who} has {thing}"
        else:
            deed, other = random.choice(["helped", "likes", "met", "saw"]), f"the {random.choice(BEINGS)}"
            self.tellings = [f"{who} {deed} {other}"]
            self.question, self.answer = f"Who {deed} {other}?", f"{who} {deed} {other}"


def _facts(random: Random, count: int) -> list[_Fact]:
    people: list[str] = []
    while len(people) < count:
        people += [who for who in [_who(random)] if who.split()[-1] not in {p.split()[-1] for p in people}]
    return [_Fact(random, who) for who in people]


def _story(random: Random) -> str:
    """Tell two to four facts, and tell them again."""
    facts = _facts(random, random.randint(2, 4))
    sentences = [_sentence(random.choice(fact.tellings)) for fact in facts]
    again = [f"{random.choice(['Then', 'So', 'Again'])} {random.choice(fact.tellings)}." for fact in facts]
    random.shuffle(again)
    return " ".join(sentences + again)


def _giving(random: Random) -> str:
    """Name two, and let the first be named again: the other one gets the thing. Source: Wang et al. 2022."""
    first, second = _names(random, 2)
    pair = random.sample([first, second], 2)
    where, thing = f"the {random.choice(ROOMS)}", random.choice(THINGS)
    lead = random.choice(
        ["When {} and {} went to {},", "Then {} and {} were at {}, and", "After {} and {} came to {},"]
    )
    return f"{lead.format(*pair, where)} {first} {random.choice(['gave', 'brought'])} {_a(thing)} to {second}."


def _pronoun(random: Random) -> str:
    women = random.random() < 0.5
    name, thing, being = random.choice(WOMEN if women else MEN), random.choice(THINGS), random.choice(BEINGS)
    she, her = ("she", "her") if women else ("he", "his")
    return random.choice(
        [
            f"{name} {random.choice(GETS)} {her} {thing}, "
            f"and {she} {random.choice(MOVES)} to the {random.choice(ROOMS)}.",
            f"The {being} saw {name} when {she} {random.choice(RESTS)} {_place(random)}.",
            f"{name} said that {she} has {_a(_noun(random, THINGS))}.",
        ]
    )


def _simple(random: Random) -> str:
    """Write unrelated sentences, some without a capital or an end, as people type them."""
    sentences = []
    for _ in range(random.randint(1, 4)):
        who = _who(random)
        words = random.choice(
            [
                f"{who} {random.choice(RESTS)} {_place(random)}",
                f"{who} {random.choice(MOVES)} to the {_noun(random, ROOMS)}",
                f"{who} {random.choice(GETS)} {_a(_noun(random, THINGS))} {_place(random)}",
                f"{who} {random.choice(MOVES)} to the {random.choice(SURFACES + ROOMS)} and {random.choice(GETS)} "
                f"the {_noun(random, THINGS)}",
            ]
        )
        sentences.append(_sentence(words))
    text = " ".join(sentences)
    return text[:-1].lower() if random.random() < 0.3 else text


def _list(random: Random) -> str:
    """Say a list of words, and say it again."""
    pool = random.choice([COLOURS, THINGS, BEINGS, WOMEN + MEN, NUMBERS, [_made_up(random) for _ in range(8)]])
    words = random.sample(pool, random.randint(3, min(8, len(pool))))
    return ". ".join([", ".join(words)] * random.randint(2, 4)) + "."


def _sequence(random: Random) -> str:
    words = random.choice([NUMBERS, DAYS])
    start = random.randrange(len(words) - 2)
    return ", ".join(words[start : start + random.randint(3, len(words))]) + "."


def _conversation(random: Random) -> str:
    """Tell facts, and ask for them."""
    facts = _facts(random, random.randint(1, 3))
    story = " ".join(_sentence(random.choice(fact.tellings)) for fact in facts) if random.random() < 0.9 else ""
    text = ""
    for number, fact in enumerate(random.sample(facts, random.randint(1, len(facts)))):
        question = " ".join(part for part in (story if number == 0 else "", fact.question) if part)
        text += f"{QUESTION}{question}{END}{ANSWER}{_sentence(fact.answer)}{END}"
    return text.removesuffix(END)


KINDS_OF_DOCUMENT: Final[dict[Callable[[Random], str], int]] = {
    _story: 30, _giving: 15, _pronoun: 10, _simple: 20, _list: 10, _sequence: 2, _conversation: 13,
}  # fmt: skip
"""Each kind with its share, in percent."""


def documents(seed: int) -> Iterator[str]:
    """Yield documents without end, the same for the same seed; some are several kinds in a row."""
    random = Random(seed)
    kinds, shares = list(KINDS_OF_DOCUMENT), list(KINDS_OF_DOCUMENT.values())
    while True:
        parts = [kind(random) for kind in random.choices(kinds, shares, k=random.choice([1, 1, 2, 3]))]
        talk = [part for part in parts if part.startswith(QUESTION)]
        yield talk[0] if talk else " ".join(parts)


def corpus() -> str:
    """Return the texts of ``attention_client/survey/texts.txt``, one a line, which no training sees."""
    texts = (each for each in documents(2026) if QUESTION not in each and len(each) <= 240)
    return "".join(f"{each}\n" for each in dict.fromkeys(islice(texts, 300)))


if __name__ == "__main__":
    print(corpus(), end="")
