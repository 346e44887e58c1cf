"""Patterns of module paths: the choice of peft, in steps that no pattern can multiply."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_service.modules.checkpoints import module_patterns
from attention_service.modules.checkpoints.module_patterns import ModulePatterns, UnreadPattern

PATHS = (
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.11.self_attn.v_proj",
    "model.layers.12.mlp.down_proj",
    "transformer.h.0.attn.c_attn",
    "encoder.layer.3.attention.self.query",
    "lm_head",
    "q_proj",
    "xq_proj",
    "model_layers_1",
    "a.b",
    "",
)
WRITTEN = (
    "q_proj",
    "self_attn.v_proj",
    r"layers\.1\.self_attn\.v_proj",
    "layers.1.self_attn.v_proj",
    r"^model\.layers\.\d+\.self_attn\.q_proj$",
    r"^model\.layers\.\d+\..*",
    r".*\.(q|v)_proj",
    r"model\.layers\.(1|12)\..*",
    r"layers\.[0-9]+\.self_attn\.[qkv]_proj",
    r"layers\.1\d?\.(self_attn|mlp)\.(?:v|down)_proj",
    r"(?P<stack>model|transformer)\.(layers|h)\.\d{1,2}\..+",
    r"[^.]+",
    r"(.+\.)*v_proj",
    r"\w+\.\w+",
    r".*?attn.*?",
    r"layers\.(?:[2-9]|1[0-9])\.mlp\.\w+_proj",
    r"[a-z\d_]{6}",
    r"[\w-]+",
    r"a|b|q_proj",
    r"q_proj|",
    r"a)|(lm_head",
    r"\Alm_head\Z",
    r".*(^q_proj)",
    r"\D*",
    r".{3,}",
    r"\S*\W\S{,3}",
    r"model\-x|model\_layers\_1",
    "",
)
HOSTILE = (
    r"(a+)+$",
    r"(a*)*b",
    r"(a|a)*b",
    r"(.*a){24}b",
    r"((a?){32}a{32})+c",
    r"(\w+\.?)+!",
    r"(.*)*(.*)*(.*)*x",
    r"((((((((a*)*)*)*)*)*)*)*)*b",
    r"(((a|b|ab)*)+)+c",
)
REFUSED = (
    ("(?=q)q_proj", "(?="),
    ("(?!q)k_proj", "(?!"),
    ("(?<=a)b", "(?<"),
    ("(?i)q", "(?i"),
    (r"(a)\1", r"\1"),
    (r"a\b", r"\b"),
    ("a++", "repetitions beside"),
    ("*a", "has * where"),
    ("(a", "ends within"),
    ("a)", "without its ("),
    ("[a", "ends within"),
    ("[b-a]", "does not go up"),
    (r"[\b]", r"\b"),
    ("a{2", "has { without"),
    ("a{3,2}", "do not go up"),
    ("a\\", "ends within"),
    ("(((a{200}){200}){200}){200}", "too long"),
    ("((((){65536}){65536}){65536}){65536}", "too long"),
    ("(" * 100 + "a" + ")" * 100, "groups in groups"),
    ("[" + "ab" * 1000 + "]", "between [ and ]"),
    ("a" * 2**19, "characters of patterns"),
)  # fmt: skip


def of_peft(patterns, path):
    """The choice of peft, by Python's expressions (``get_pattern_key``)."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", path)), None)


@pytest.mark.parametrize("pattern", WRITTEN)
def test_a_pattern_fits_the_paths_that_it_fits_in_peft(pattern):
    patterns = ModulePatterns("rank_pattern", (pattern,))
    assert [patterns.first(path) for path in PATHS] == [of_peft([pattern], path) for path in PATHS]


def test_the_first_of_several_patterns_is_chosen_as_in_peft():
    for turn in range(len(WRITTEN)):
        turned = WRITTEN[turn:] + WRITTEN[:turn]
        patterns = ModulePatterns("rank_pattern", turned)
        assert [patterns.first(path) for path in PATHS] == [of_peft(turned, path) for path in PATHS]


_ONE = st.sampled_from(["a", "b", r"\.", ".", r"\d", r"\w", "[ab]", "[^a]", "[a-c.]", "1", "^", "$"])
_WHOLE = st.recursive(
    _ONE,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{,2}"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
    ),
    max_leaves=6,
)


@given(_WHOLE, st.text("ab1.", max_size=8))
def test_any_pattern_fits_any_path_as_in_peft(pattern, path):
    assert ModulePatterns("rank_pattern", (pattern,)).first(path) == of_peft([pattern], path)


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("path", ["a" * 400, "a." * 200, "ab" * 200 + "!"], ids=len)
def test_steps_grow_with_the_path_and_not_faster(pattern, path):
    """Twice the path takes twice the steps, by the count of the matcher; a matcher that backtracks never ends here."""
    once, twice = (ModulePatterns("rank_pattern", (pattern,)) for _ in range(2))
    assert once.first(path) == once.first(path)
    twice.first(path + path)
    assert twice.steps <= 2 * once.steps
    assert once.steps <= 2 * (len(path) + 1) * 40 * len(pattern)


@pytest.mark.parametrize(("pattern", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_read_is_refused_by_name(pattern, reason):
    with pytest.raises(UnreadPattern, match=re.escape(reason)) as told:
        ModulePatterns("alpha_pattern", (pattern,))
    assert "alpha_pattern" in str(told.value)
    assert len(str(told.value)) < 400


def test_all_paths_together_have_a_limit_of_steps(monkeypatch):
    monkeypatch.setattr(module_patterns, "_MAX_STEPS", 1000)
    patterns = ModulePatterns("rank_pattern", ("q_proj", "(a|b)*c"))
    while patterns.steps < 800:
        patterns.first("ab" * 10)
    with pytest.raises(UnreadPattern, match="more than 1000 steps"):
        patterns.first("ab" * 1000)
    assert patterns.steps < 1100
