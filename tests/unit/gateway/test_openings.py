"""Openings: a turn is compared with an earlier one in one go, and the ids are those of a full encode."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_styles import STYLES, byte_level

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.gateway.prompts.prompt_memory import (
    ENTRY_BYTES,
    OPENINGS_PER_HEAD,
    Opening,
    Piece,
    PromptMemory,
    name_piece,
)
from moongate.gateway.prompts.tokenizing import Tokenized, Tokenizing

TAG, OTHER_TAG = b"\0\0", b"\0\1"
HEAD = 4
RENDERERS = {
    name: style.renderer(byte_level(style.control_tokens), ModelRenderer)
    for name, style in STYLES.items()
}


def opening(text: str) -> Opening:
    return Opening(text, [], [])


def anywhere(text: str, at: int) -> bool:
    return True


def found(memory: PromptMemory, text: str, tag: bytes = TAG) -> str | None:
    opening = memory.find_opening(text, tag, anywhere)
    return opening.text if opening is not None else None


def remembering(*texts: str, bytes_max: int = 1 << 20) -> PromptMemory:
    memory = PromptMemory(bytes_max, opening_chars_min=HEAD)
    for text in texts:
        memory.add_opening(opening(text), TAG, None)
    return memory


# --- the memory -----------------------------------------------------------------------------------


def test_the_longest_opening_is_found() -> None:
    memory = remembering("same a", "same abc", "same ab", "other")
    assert found(memory, "same abcd") == "same abc"
    assert found(memory, "same abd") == "same ab"
    assert found(memory, "same x") is None
    assert found(memory, "same abcd", OTHER_TAG) is None


def test_an_opening_counts_only_where_the_text_may_be_cut_behind_it() -> None:
    memory = remembering("same a", "same abc")

    def before_b(text: str, at: int) -> bool:
        return text[at] == "b"

    assert memory.find_opening("same abcd", TAG, before_b) is not None
    assert memory.find_opening("same acd", TAG, before_b) is None


def test_a_longer_opening_takes_the_place_of_the_one_that_it_goes_on_from() -> None:
    memory = remembering("same a")
    earlier = memory.find_opening("same ab", TAG, anywhere)
    memory.add_opening(opening("same ab"), TAG, earlier)
    assert found(memory, "same ac") is None
    assert found(memory, "same abc") == "same ab"


def test_an_opening_that_was_forgotten_meanwhile_can_be_gone_on_from() -> None:
    memory = remembering("same a")
    earlier = memory.find_opening("same ab", TAG, anywhere)
    memory.add_opening(opening("same ab"), TAG, earlier)
    memory.add_opening(opening("same abc"), TAG, earlier)
    assert found(memory, "same abcd") == "same abc"


def test_of_texts_that_hardly_differ_the_oldest_goes_first() -> None:
    texts = [f"same ab{chr(97 + n)}" for n in range(OPENINGS_PER_HEAD + 1)]
    memory = remembering(*texts)
    assert [found(memory, f"{text}x") for text in texts] == [None, *texts[1:]]


def test_conversations_that_share_a_long_beginning_do_not_push_each_other_out() -> None:
    texts = [f"{'shared ' * 20}{n:03}{'own ' * 20}" for n in range(100)]
    memory = remembering(*texts)
    assert [found(memory, f"{text} and more") for text in texts] == texts


def test_the_same_opening_is_kept_once() -> None:
    memory = remembering(*["same a"] * 20)
    assert [len(kept) for kept in memory._openings.values()] == [1]


def test_an_opening_whose_pieces_are_forgotten_is_forgotten() -> None:
    memory = PromptMemory(1 << 20, opening_chars_min=HEAD)
    piece = Piece(b"same a", b"")
    key = name_piece(piece.text, TAG)
    memory.add_opening(Opening("same a", [key], [piece]), TAG, None)
    assert found(memory, "same ab") is None
    assert memory.bytes_used == 0
    memory.add_piece(key, piece)
    memory.add_opening(Opening("same a", [key], [piece]), TAG, None)
    assert found(memory, "same ab") == "same a"


def test_a_short_opening_is_not_kept() -> None:
    assert remembering("abc").bytes_used == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=40))
def test_the_bound_holds_and_what_is_forgotten_is_forgotten_everywhere(
    steps: list[tuple[str, int]],
) -> None:
    memory = remembering(bytes_max=3 * ENTRY_BYTES)
    for head, length in steps:
        text = head * (HEAD + length)
        memory.add_opening(opening(text), TAG, memory.find_opening(text, TAG, anywhere))
        assert memory.bytes_used <= 3 * ENTRY_BYTES
        kept = [one for others in memory._openings.values() for one in others]
        assert len(kept) == len(memory._heads) == len(memory._entries)
        assert all(one in memory._entries for one in kept)
        assert all(memory._openings.values())


# --- with a tokenizer -----------------------------------------------------------------------------


async def tokenize(tokenizing: Tokenizing, name: str, text: str, special: bool) -> Tokenized:
    return await tokenizing.tokenize(RENDERERS[name], text, add_special_tokens=special)


def check_all(name: str, texts: Sequence[str], *, special: bool = False) -> None:
    """Tokenise these in turn, with openings of any length; each is as a full encode has it."""

    async def story() -> None:
        tokenizing = Tokenizing(budget_s=10.0, memory_bytes_max=1 << 22)
        tokenizing.memory = PromptMemory(1 << 22, opening_chars_min=HEAD)
        try:
            for text in texts:
                tokenized = await tokenize(tokenizing, name, text, special)
                whole = RENDERERS[name].encode(text, add_special_tokens=special)
                assert tokenized.is_whole
                assert tokenized.ids_json() == str(whole).replace(" ", "").encode()
                assert b"".join(piece.text for piece in tokenized.pieces) == text.encode()
        finally:
            tokenizing.close()

    asyncio.run(story())


@pytest.mark.parametrize("name", sorted(STYLES))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_texts_that_go_on_from_any_place_are_tokenised_as_a_whole(
    name: str, data: st.DataObject
) -> None:
    marks = sorted(RENDERERS[name].boundaries.marks)
    words = st.sampled_from(["a", " b", "\n", "é🙂", "x" * 70, "<|", *marks])
    text, texts = "", []
    for _ in range(data.draw(st.integers(2, 6))):
        cut = data.draw(st.integers(0, len(text)))  # so the next may go on inside of a mark
        text = text[:cut] + "".join(data.draw(st.lists(words, max_size=12)))
        texts.append(text)
    check_all(name, texts, special=data.draw(st.booleans()))


def test_a_message_that_was_added_to_is_not_cut_where_it_had_ended() -> None:
    said = "<|im_start|>user\n" + "word " * 30
    turn = f"{said}<|im_end|>\n<|im_start|>assistant\n"
    check_all("chatml", [turn, f"{said}and more<|im_end|>\n<|im_start|>assistant\n", turn])
