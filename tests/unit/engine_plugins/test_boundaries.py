"""Pieces of a text give the ids of the whole: over templates, builds of tokenizers, and hard texts.

The full encode is the judge throughout. What is no mark is shown to be none for a reason: a text for
which a cut there would give other ids.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_styles import (
    BUILDS,
    CACHED_MODELS,
    HARD_TEXTS,
    STYLES,
    Message,
    add,
    byte_level,
    conversations,
    dropping,
    from_file,
    legacy_llama,
    texts,
    tools,
)
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from moongate.engine_plugins.boundaries import PIECE_CHARS_MIN, Boundaries, find_boundaries
from moongate.engine_plugins.vllm_render import ModelRenderer

SMOLLM2 = next(iter(CACHED_MODELS.glob("smollm2-*/tokenizer.json")), None)
ALL_MARKERS = tuple(dict.fromkeys(token for s in STYLES.values() for token in s.control_tokens))


LOADED = [*BUILDS, *(["smollm2"] if SMOLLM2 is not None else [])]


@functools.cache
def renderer(build: str, style: str) -> ModelRenderer:
    control_tokens = STYLES[style].control_tokens
    if build in BUILDS:
        tokenizer = BUILDS[build](control_tokens)
    else:
        assert SMOLLM2 is not None
        tokenizer = from_file(SMOLLM2.parent, control_tokens)
    return STYLES[style].renderer(tokenizer, ModelRenderer)


@pytest.mark.skipif(SMOLLM2 is None, reason=f"no SmolLM2 in {CACHED_MODELS}; make run-real puts it")
def test_smollm2_is_among_the_tokenizers() -> None:
    """Where it is missing the tests below go without, and this one says so."""
    assert "smollm2" in LOADED
    assert renderer("smollm2", "chatml").vocabulary_size == 49_152


def token(content: str, **flags: bool) -> AddedToken:
    """Return a control token as models have them, but for the flags."""
    return AddedToken(content, **{"special": True, "normalized": False, **flags})


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def ids_of_pieces(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    return [one for piece in pieces for one in ids_of(tokenizer, piece)]


def check_pieces(model: ModelRenderer, text: str, chars_min: int) -> None:
    pieces = model.boundaries.split(text, chars_min)
    assert "".join(pieces) == text
    assert all(piece.startswith(model.boundaries.marks) for piece in pieces[1:])
    assert all(len(piece) >= chars_min for piece in pieces[:-1])
    ids = [one for of_piece in model.encode_pieces(pieces) for one in of_piece]
    assert ids == model.encode(text, add_special_tokens=False)


# --- templates and tokenizers ---------------------------------------------------------------------


@pytest.mark.parametrize("build", LOADED)
@pytest.mark.parametrize("style", STYLES)
def test_a_models_control_tokens_are_its_marks(style: str, build: str) -> None:
    control, template = STYLES[style].control_tokens, STYLES[style].template
    special = {STYLES[style].bos_token, STYLES[style].eos_token}
    named = {one for one in control if one in template or one in special}
    assert set(renderer(build, style).boundaries.marks) >= named


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=30)
@given(data=st.data(), build=st.sampled_from(LOADED))
def test_a_conversations_pieces_have_the_ids_of_the_whole(
    style: str, build: str, data: st.DataObject
) -> None:
    model = renderer(build, style)
    messages: list[Message] = data.draw(conversations(STYLES[style].control_tokens))
    body = {"messages": messages, "tools": data.draw(tools())}
    text = model.chat_text({name: value for name, value in body.items() if value is not None})
    for chars_min in (1, data.draw(st.integers(2, 200)), PIECE_CHARS_MIN):
        check_pieces(model, text, chars_min)


@pytest.mark.parametrize("build", LOADED)
@settings(deadline=None, max_examples=20)
@given(style=st.sampled_from(sorted(STYLES)), text=texts(ALL_MARKERS), chars_min=st.integers(1, 80))
def test_any_texts_pieces_have_the_ids_of_the_whole(
    build: str, style: str, text: str, chars_min: int
) -> None:
    check_pieces(renderer(build, style), text, chars_min)


@pytest.mark.parametrize("build", BUILDS)
def test_every_hard_text_stands_between_every_two_marks(build: str) -> None:
    for style in STYLES:
        model = renderer(build, style)
        for mark in model.boundaries.marks:
            check_pieces(model, mark.join(HARD_TEXTS), 1)
            check_pieces(model, mark.join(reversed(HARD_TEXTS)) + mark * 3, 1)


# --- where a text is cut --------------------------------------------------------------------------

IM = Boundaries(["<|im_start|>", "<|im_end|>", "<|im"])


@pytest.mark.parametrize(
    ("text", "chars_min", "pieces"),
    [
        ("", 1, [""]),
        ("no mark", 1, ["no mark"]),
        ("<|im_start|>", 1, ["<|im_start|>"]),
        ("a<|im_start|>b<|im_end|>c", 1, ["a", "<|im_start|>b", "<|im_end|>c"]),
        ("a<|im_start|>b<|im_end|>c", 2, ["a<|im_start|>b", "<|im_end|>c"]),
        ("a<|im_start|>b<|im_end|>c", 14, ["a<|im_start|>b", "<|im_end|>c"]),
        ("a<|im_start|>b<|im_end|>c", 15, ["a<|im_start|>b<|im_end|>c"]),
        ("<|im_end|><|im_start|><|im", 1, ["<|im_end|>", "<|im_start|>", "<|im"]),
    ],
)
def test_a_text_is_cut_before_marks(text: str, chars_min: int, pieces: list[str]) -> None:
    assert IM.split(text, chars_min) == pieces


def test_without_marks_a_text_stays_whole() -> None:
    assert Boundaries(()).split("a<|im_start|>b" * 99, 1) == ["a<|im_start|>b" * 99]


@settings(deadline=None, max_examples=100)
@given(
    marks=st.lists(st.sampled_from(ALL_MARKERS), max_size=6, unique=True),
    begin=texts(ALL_MARKERS),
    ends=st.tuples(texts(ALL_MARKERS), texts(ALL_MARKERS)),
    chars_min=st.sampled_from([1, 7, PIECE_CHARS_MIN]),
)
def test_texts_that_begin_alike_are_cut_alike(
    marks: list[str], begin: str, ends: tuple[str, str], chars_min: int
) -> None:
    boundaries = Boundaries(marks)
    whole_pieces = boundaries.split(begin, chars_min)[:-1]
    for end in ends:
        assert boundaries.split(begin + end, chars_min)[: len(whole_pieces)] == whole_pieces


def test_only_named_tokens_are_marks() -> None:
    tokenizer = byte_level(["<a>", "<b>", "<c>"])
    assert find_boundaries(tokenizer, ["{{ '<a>' }}", "<c>"]).marks == ("<a>", "<c>")
    assert find_boundaries(tokenizer, ["<a", "b>"]).marks == ()
    assert find_boundaries(tokenizer, []).marks == ()


# --- what is no mark, and why ---------------------------------------------------------------------

IM_START = "<|im_start|>"


@pytest.mark.parametrize(
    ("added", "no_mark", "text"),
    [
        # Takes the white space before it.
        ([token("<m>", lstrip=True)], "<m>", "a <m>"),
        # Is none where it touches a word.
        ([token("<m>", single_word=True)], "<m>", "a<m>"),
        ([token("<m>"), token("<m>x", single_word=True)], "<m>", "a<m>x"),
        # Is looked for after all else, in text that was normalised in one go.
        ([token("<m>", normalized=True)], "<m>", "a<m>b"),
        # Another takes part of it.
        ([token("x<"), token("<|im_start|>")], IM_START, "ax<|im_start|>b"),
        ([token("<|im_start|"), token("|>")], "|>", "a<|im_start|>"),
        ([token("<<m>>"), token("<m>")], "<m>", "a<<m>>"),
        # Another that is found in its place takes the white space before it.
        ([token("<|im"), token(IM_START, lstrip=True)], "<|im", "a <|im_start|>"),
        # Another is a word of its own only at a text's end.
        ([token("foo", single_word=True), token("USER:")], "USER:", "fooUSER:"),
        ([token("foo", single_word=True), token("_m")], "_m", "foo_m"),
        ([token("foo", single_word=True), token("é>")], "é>", "fooé>"),
        ([token("foo", single_word=True), token("\u0301>")], "\u0301>", "foo\u0301>"),
    ],
)
def test_a_token_that_depends_on_its_place_is_no_mark(
    added: list[AddedToken], no_mark: str, text: str
) -> None:
    tokenizer = legacy_llama(()) if added[0].normalized else byte_level(())
    add(tokenizer, added)
    names = [one.content for one in added]
    assert no_mark not in find_boundaries(tokenizer, names).marks
    # A cut there would have been wrong.
    pieces = Boundaries([no_mark]).split(text, 1)
    assert len(pieces) > 1
    assert ids_of_pieces(tokenizer, pieces) != ids_of(tokenizer, text)


@pytest.mark.parametrize(
    "added",
    [
        [token("<m>", rstrip=True)],
        [token("<m>"), token("a<", normalized=True)],
        [token("<m>"), token("<m>x")],
        [token("<m>"), token("foo", single_word=True)],
        [token("<m>"), token("foo", lstrip=True, rstrip=True)],
        [token("<m>", special=False), token("<|im")],
        [token("｜m"), token("m>")],
    ],
)
def test_what_others_can_not_disturb_is_a_mark(added: list[AddedToken]) -> None:
    tokenizer = byte_level(added)
    mark = added[0].content
    boundaries = find_boundaries(tokenizer, [mark])
    assert boundaries.marks == (mark,)
    for before in ("a", " ", "foo", "a<", "x "):
        for after in ("x", "  foo", " ", ">", mark):
            text = before + mark + after
            assert len(boundaries.split(text, 1)) > 1
            assert ids_of_pieces(tokenizer, boundaries.split(text, 1)) == ids_of(tokenizer, text)


@pytest.mark.parametrize("content", [" ", "\n", " <m>", "<m>\n", "\u3000<m>", "aa", "<<m><"])
def test_a_token_with_white_space_or_its_own_beginning_at_an_end_is_left_out(content: str) -> None:
    """No text is known for which that is needed; no model is known that has such control tokens."""
    tokenizer = byte_level([token(content), token("<r>", rstrip=True)])
    assert find_boundaries(tokenizer, [content]).marks == ()
    for text in (f"a{content}", f"<r>{content}b", f"<r> {content * 3}", f"a {content}{content[0]}"):
        pieces = Boundaries([content]).split(text, 1)
        assert ids_of_pieces(tokenizer, pieces) == ids_of(tokenizer, text)


@pytest.mark.parametrize(("probability", "marks"), [(0.5, ()), (1e-6, ()), (0.0, (IM_START,))])
def test_a_tokenizer_that_encodes_by_chance_has_no_marks(
    probability: float, marks: tuple[str, ...]
) -> None:
    tokenizer = dropping([IM_START], probability)
    assert find_boundaries(tokenizer, [IM_START]).marks == marks


def test_such_a_tokenizer_has_no_ids_that_could_be_foretold() -> None:
    tokenizer = dropping([IM_START], 0.5)
    text = "The quick brown fox" * 4
    assert len({tuple(ids_of(tokenizer, text)) for _ in range(20)}) > 1


def test_a_tokenizer_that_fails_the_check_has_no_marks() -> None:
    tokenizer = byte_level([IM_START])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert find_boundaries(tokenizer, [IM_START]).marks == ()
    pieces = Boundaries([IM_START]).split("a<|im_start|>b", 1)
    assert ids_of_pieces(tokenizer, pieces) != ids_of(tokenizer, "a<|im_start|>b")


def test_a_tokenizer_without_added_tokens_has_no_marks() -> None:
    assert find_boundaries(byte_level(()), [IM_START]).marks == ()


# --- any added tokens at all ----------------------------------------------------------------------

LETTERS = "<>|_ ax\u00e9"


def _merges(pairs: Sequence[tuple[str, str]], letters: Sequence[str]) -> models.BPE:
    vocabulary = {"<unk>": 0, **{letter: n for n, letter in enumerate(letters, 1)}}
    for left, right in pairs:
        vocabulary.setdefault(left + right, len(vocabulary))
    return models.BPE(vocabulary, list(pairs), unk_token="<unk>", fuse_unk=True)


def _small_tokenizer(build: str, normalizer: str) -> Tokenizer:
    """Return a tokenizer of few letters, in which neighbours merge wherever they can."""
    if build == "bytes":
        pairs = [("a", "x"), ("x", "x"), ("Ġ", "a"), ("a", "a"), ("<", "x"), ("Ġ", "Ġ")]
        tokenizer = Tokenizer(_merges(pairs, sorted(pre.ByteLevel.alphabet())))
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        pairs = [("▁", "a"), ("a", "x"), ("x", "x"), ("▁a", "x"), ("▁", "▁"), ("<", "x")]
        tokenizer = Tokenizer(_merges(pairs, [*"▁<>|_axe"]))
        tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=build, split=False)
    known: dict[str, list[Any]] = {
        "none": [],
        "prepend": [normalizers.Prepend("▁")],
        "nfd": [normalizers.NFD(), normalizers.Replace("\u0301", "x")],
        "lower": [normalizers.Lowercase(), normalizers.Replace(" ", "▁")],
    }
    if known[normalizer]:
        tokenizer.normalizer = normalizers.Sequence(known[normalizer])
    return tokenizer


contents = st.text(LETTERS, min_size=1, max_size=4).filter(lambda text: text.strip() == text)
unlikely = st.sampled_from([False, False, False, True])
any_token = st.builds(
    AddedToken,
    contents,
    single_word=unlikely,
    lstrip=unlikely,
    rstrip=unlikely,
    normalized=unlikely,
    special=st.booleans(),
)


@settings(deadline=None, max_examples=250)
@given(
    build=st.sampled_from(["bytes", "first", "always", "never"]),
    normalizer=st.sampled_from(["none", "prepend", "nfd", "lower"]),
    added=st.lists(any_token, min_size=1, max_size=5, unique_by=lambda one: one.content),
    data=st.data(),
)
def test_whatever_tokens_are_added_pieces_have_the_ids_of_the_whole(
    build: str, normalizer: str, added: list[AddedToken], data: st.DataObject
) -> None:
    tokenizer = add(_small_tokenizer(build, normalizer), added)
    names = [one.content for one in added]
    named = data.draw(st.lists(st.sampled_from(names), unique=True))
    boundaries = find_boundaries(tokenizer, named)
    assert set(boundaries.marks) <= set(names)
    parts = st.sampled_from([*names, *names, *LETTERS])
    for text in data.draw(st.lists(st.lists(parts, max_size=10).map("".join), max_size=8)):
        pieces = boundaries.split(text, 1)
        assert ids_of_pieces(tokenizer, pieces) == ids_of(tokenizer, text)
