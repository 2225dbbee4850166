"""Text of a known number of tokens."""

from __future__ import annotations

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.loadtest.words import FIRST_WORDS, WORDS, TokenCosts, make_text
from moongate.simulator.server import BUNDLED_TOKENIZER


def test_a_word_is_a_token_wherever_it_stands() -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    assert (len(set(WORDS)), len(set(FIRST_WORDS))) == (256, 128)
    for word in WORDS:
        assert len(renderer.encode(f" {word}", add_special_tokens=False)) == 1
    for word in FIRST_WORDS:
        assert len(renderer.encode(word, add_special_tokens=False)) == 1
    for count in (1, 2, 64, 1000):
        text = make_text(f"some {count}", count)
        assert len(renderer.encode(text, add_special_tokens=False)) == count


def test_a_name_always_gives_the_same_text_and_another_name_another() -> None:
    assert make_text("a", 5) == "and sign thread method support"
    assert make_text("a", 8).startswith(make_text("a", 5))
    assert make_text("b", 5) != make_text("a", 5)


def test_words_for_tokens_follow_what_was_measured() -> None:
    assert TokenCosts(per_word=1.25).words_for(100) == 80
    assert TokenCosts().words_for(-3) == 1
