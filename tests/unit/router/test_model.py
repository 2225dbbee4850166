"""What a prompt says of itself: by which chain it is known where, and what of it can be reused."""

from moongate.router.model import TEXT_SPACE, BlockSpace, KnownPart, Prompt

from .builders import SPACE, chain

TEXT = chain(7, 7, 8, 8)
BLOCKS = chain(1, 2, 3, 4)
OTHER = BlockSpace(3)
NOTHING = KnownPart((), 64, 0, is_text=True)


def test_an_exact_prompt_is_known_in_the_spaces_of_its_chains_only() -> None:
    prompt = Prompt(5, {SPACE: BLOCKS})
    assert prompt.known_in(SPACE) == KnownPart(BLOCKS, 2, 2, is_text=False)
    assert prompt.known_in(OTHER) == prompt.known_in(TEXT_SPACE) == NOTHING


def test_a_prompt_known_by_its_text_is_so_in_every_space() -> None:
    prompt = Prompt(1000, {TEXT_SPACE: TEXT}, is_exact=False)
    assert prompt.known_in(SPACE) == KnownPart(TEXT, 64, 2, is_text=True)
    assert prompt.known_in(SPACE) == prompt.known_in(TEXT_SPACE)


def test_a_prompt_known_in_part_is_known_by_blocks() -> None:
    prompt = Prompt(1000, {SPACE: BLOCKS}, is_exact=False)
    assert prompt.known_in(SPACE) == KnownPart(BLOCKS, 2, 2, is_text=False)
    assert prompt.known_in(OTHER) == NOTHING


def test_the_last_token_is_always_computed() -> None:
    assert Prompt(4, {SPACE: BLOCKS}).known_in(SPACE).usable_blocks == 1
    assert Prompt(0, {SPACE: ()}).known_in(SPACE).usable_blocks == 0


def test_an_estimate_below_what_is_known_bounds_what_can_be_reused() -> None:
    assert Prompt(3, {SPACE: BLOCKS}, is_exact=False).known_in(SPACE).usable_blocks == 1
