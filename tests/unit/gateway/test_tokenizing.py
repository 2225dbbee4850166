"""What of a text is encoded, when, and where: with a real tokenizer that can be watched and held up."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_styles import STYLES, byte_level, texts, word_piece
from tokenizers import Tokenizer, processors

from moongate.engine_plugins.vllm_render import ModelRenderer, PromptUnsupported
from moongate.gateway.prompts import tokenizing as module
from moongate.gateway.prompts.tokenizing import (
    BACKLOG_BYTES_MAX,
    BYTES_PER_S_PRIOR,
    INLINE_BYTES,
    Effort,
    Tokenized,
    Tokenizing,
)
from moongate.router.blocks import pack_tokens

CHATML = STYLES["chatml"]
LONG = "word " * (INLINE_BYTES // 5 + 1)
"""Too long for the event loop."""


class Watched(ModelRenderer):
    """Notes each batch of texts and the thread that encodes it; can be held up, and can fail."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches: list[list[str]] = []
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: Exception | None = None

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        self.batches.append(list(pieces))
        self.threads.append(threading.current_thread().name)
        self.may_go.wait(timeout=10)
        if self.error is not None:
            raise self.error
        return super().encode_pieces(pieces)

    @property
    def encoded(self) -> list[str]:
        return sorted(text for batch in self.batches for text in batch)


def watched(tokenizer: Tokenizer | None = None) -> Watched:
    return CHATML.renderer(tokenizer or byte_level(CHATML.control_tokens), Watched)


def a_chat(*contents: str) -> str:
    return "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)


def ids(tokenized: Tokenized) -> list[int]:
    read: list[int] = json.loads(tokenized.ids_json())
    assert pack_tokens(read) == tokenized.tokens()
    return read


def run(story: Callable[[Tokenizing], Awaitable[None]], *, budget_s: float = 10.0) -> None:
    async def main() -> None:
        tokenizing = Tokenizing(budget_s=budget_s, memory_bytes_max=1 << 24)
        try:
            await story(tokenizing)
        finally:
            tokenizing.close()

    asyncio.run(main())


async def all_done(tokenizing: Tokenizing) -> None:
    """Wait until nothing is under way."""
    while tokenizing._under_way:
        await asyncio.wait(set(tokenizing._under_way.values()))


async def begun(renderer: Watched, batches: int) -> None:
    """Wait until so many batches have been begun."""
    while len(renderer.batches) < batches:
        await asyncio.sleep(0.001)


def is_at_rest(tokenizing: Tokenizing) -> bool:
    return not tokenizing._under_way and tokenizing.effort.backlog_bytes == 0


# --- what is encoded ------------------------------------------------------------------------------


def test_a_short_text_is_encoded_in_the_event_loop() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat("hello", "world")
        tokenized = await tokenizing.tokenize(renderer, text)
        assert tokenized.is_whole
        assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert renderer.threads == ["MainThread"]

    run(story)


def test_only_what_is_new_is_encoded() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        first, second = a_chat("a" * 90, "b" * 90), a_chat("a" * 90, "b" * 90, "c" * 90)
        for text in (first, second, first, second):
            tokenized = await tokenizing.tokenize(renderer, text)
            assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        before, after = map(renderer.boundaries.split, (first, second))
        assert renderer.batches == [before, [piece for piece in after if piece not in before]]

    run(story)


def test_a_piece_that_comes_twice_in_a_text_is_encoded_once() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(*["same" * 20] * 3)
        tokenized = await tokenizing.tokenize(renderer, text)
        assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert len(renderer.encoded) == len(set(renderer.boundaries.split(text)))

    run(story)


def test_a_long_text_is_shared_out_over_the_threads() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(*[f"{n} {LONG}" for n in range(8)])
        tokenizing.effort.threads = 2
        tokenized = await tokenizing.tokenize(renderer, text)
        assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert [name.startswith("tokenize") for name in renderer.threads] == [True, True]
        sizes = sorted(sum(map(len, batch)) for batch in renderer.batches)
        assert sizes[1] - sizes[0] <= len(LONG) + 100
        assert is_at_rest(tokenizing)

    run(story)


def test_two_renderers_share_no_pieces() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        text = a_chat("hello")
        renderers = [watched(), watched(word_piece(CHATML.control_tokens)), watched()]
        for renderer in renderers * 2:
            tokenized = await tokenizing.tokenize(renderer, text)
            assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert [len(renderer.batches) for renderer in renderers] == [1, 1, 1]

    run(story)


def test_without_safe_cuts_a_text_is_encoded_as_a_whole() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(byte_level(())), a_chat("a" * 90, "b" * 90)
        tokenized = await tokenizing.tokenize(renderer, text)
        assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert renderer.batches == [[text]]

    run(story)


def test_an_empty_text_has_no_ids() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        tokenized = await tokenizing.tokenize(watched(), "")
        assert (ids(tokenized), tokenized.is_whole) == ([], True)

    run(story, budget_s=1e-9)


# --- at once --------------------------------------------------------------------------------------


def test_identical_prompts_at_once_are_encoded_once() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(*[f"{n} {LONG}" for n in range(4)])
        expected = renderer.encode(text, add_special_tokens=False)
        results = await asyncio.gather(*(tokenizing.tokenize(renderer, text) for _ in range(8)))
        assert [ids(result) for result in results] == [expected] * 8
        assert renderer.encoded == sorted(renderer.boundaries.split(text))
        assert is_at_rest(tokenizing)

    run(story)


def test_a_short_prompt_waits_for_what_another_has_begun() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        long, longer = a_chat(LONG), a_chat(LONG, "and more " * 10)
        results = await asyncio.gather(
            tokenizing.tokenize(renderer, long), tokenizing.tokenize(renderer, longer)
        )
        for text, result in zip((long, longer), results, strict=True):
            assert ids(result) == renderer.encode(text, add_special_tokens=False)
        pieces = {*renderer.boundaries.split(long), *renderer.boundaries.split(longer)}
        assert renderer.encoded == sorted(pieces)

    run(story)


def test_what_the_library_fails_at_is_not_known_to_anybody_and_leaves_nothing_under_way() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(LONG)
        renderer.error = RuntimeError("the library's own")
        results = await asyncio.gather(*(tokenizing.tokenize(renderer, text) for _ in range(3)))
        assert [(result.pieces, result.is_whole) for result in results] == [([], False)] * 3
        assert is_at_rest(tokenizing)
        renderer.error = None
        assert (await tokenizing.tokenize(renderer, text)).is_whole

    run(story)


def test_an_error_in_the_event_loop_leaves_nothing_under_way() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        renderer.error = RuntimeError("the library's own")
        assert not (await tokenizing.tokenize(renderer, "short")).is_whole
        assert is_at_rest(tokenizing)

    run(story)


def test_an_error_that_nobody_waits_for_is_no_trouble() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(LONG)
        renderer.error = RuntimeError("the library's own")
        assert not (await tokenizing.tokenize(renderer, text)).is_whole
        await all_done(tokenizing)
        assert is_at_rest(tokenizing)

    run(story, budget_s=1e-9)


def test_who_leaves_early_leaves_the_work_to_be_finished() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(LONG)
        renderer.may_go.clear()
        waiter = asyncio.ensure_future(tokenizing.tokenize(renderer, text))
        await begun(renderer, 1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        renderer.may_go.set()
        await all_done(tokenizing)
        count = len(renderer.batches)
        assert (await tokenizing.tokenize(renderer, text)).is_whole
        assert len(renderer.batches) == count

    run(story)


def test_a_cancelled_waiter_takes_nothing_from_the_others() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(LONG)
        renderer.may_go.clear()
        leaving, staying = (
            asyncio.ensure_future(tokenizing.tokenize(renderer, text)) for _ in range(2)
        )
        await begun(renderer, 1)
        leaving.cancel()
        renderer.may_go.set()
        assert ids(await staying) == renderer.encode(text, add_special_tokens=False)

    run(story)


# --- within the budget ----------------------------------------------------------------------------


def test_what_can_not_be_ready_is_begun_and_there_the_next_time() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat("known" * 20, LONG, "known" * 20)
        pieces = renderer.boundaries.split(text)
        for piece in pieces[:2]:  # as if in another prompt, within its budget
            tokenizing.budget_s = 10.0
            await tokenizing.tokenize(renderer, piece)
        tokenizing.budget_s = 1e-9
        renderer.may_go.clear()
        partial = await tokenizing.tokenize(renderer, text)
        renderer.may_go.set()
        assert [piece.text.decode() for piece in partial.pieces] == pieces[:2]
        assert partial.unknown_bytes == len("".join(pieces[2:]))
        expected = renderer.encode(text, add_special_tokens=False)
        assert ids(partial) == expected[: len(ids(partial))]
        await all_done(tokenizing)
        whole = await tokenizing.tokenize(renderer, text)
        assert (whole.is_whole, ids(whole)) == (True, expected)
        assert renderer.encoded == sorted(set(pieces))

    run(story)


def test_a_machine_without_time_is_waited_for_but_not_for_ever() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat(LONG)
        tokenizing.effort.bytes_per_s = 1e9  # so it should have been ready
        renderer.may_go.clear()
        assert not (await tokenizing.tokenize(renderer, text)).is_whole
        renderer.may_go.set()
        await all_done(tokenizing)
        assert (await tokenizing.tokenize(renderer, text)).is_whole

    run(story, budget_s=1e-3)


@pytest.mark.parametrize(("backlog_bytes", "is_begun"), [(0, True), (1, False)])
def test_past_a_backlog_nothing_is_begun_that_nobody_waits_for(
    backlog_bytes: int, is_begun: bool
) -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        backlog_bytes_before = BACKLOG_BYTES_MAX + backlog_bytes
        tokenizing.effort.backlog_bytes = backlog_bytes_before
        assert not (await tokenizing.tokenize(renderer, a_chat(LONG))).is_whole
        await all_done(tokenizing)
        assert bool(renderer.batches) is is_begun
        assert tokenizing.effort.backlog_bytes == backlog_bytes_before

    run(story, budget_s=1e-3)


def test_even_a_short_text_has_its_budget() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        assert not (await tokenizing.tokenize(renderer, "short")).is_whole
        await all_done(tokenizing)
        assert renderer.threads[0].startswith("tokenize")
        assert (await tokenizing.tokenize(renderer, "short")).is_whole

    run(story, budget_s=1e-9)


def test_closing_takes_back_what_was_not_begun() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        renderer.may_go.clear()
        threads = tokenizing.effort.threads
        tokenizing.effort.threads = 1  # one batch for each
        waiters = [
            asyncio.ensure_future(tokenizing.tokenize(renderer, f"{n} {LONG}"))
            for n in range(threads + 1)
        ]
        await begun(renderer, threads)
        tokenizing.close()
        assert not (await waiters[-1]).is_whole
        renderer.may_go.set()
        assert all([(await waiter).is_whole for waiter in waiters[:-1]])
        assert is_at_rest(tokenizing)

    run(story)


def test_speed_is_measured_on_what_is_long_enough() -> None:
    effort = Effort(threads=2)
    effort.observe(1999, 1.0)
    effort.observe(5000, 0.0)
    assert effort.bytes_per_s == BYTES_PER_S_PRIOR
    effort.observe(2_000_000, 1.0)
    assert effort.bytes_per_s == pytest.approx(1_200_000)


def test_what_the_threads_take_depends_on_the_longest_batch_and_on_all() -> None:
    def batch(*sizes: int) -> list[module._New]:
        return [module._New(b"", "", bytes(size)) for size in sizes]

    effort = Effort(threads=2, bytes_per_s=10.0)
    assert effort.expected_s([]) == 0.0
    assert effort.expected_s([batch(10, 20), batch(10)]) == 3.0
    effort.backlog_bytes = 100
    assert effort.expected_s([batch(10, 20), batch(10)]) == 7.0


# --- names ----------------------------------------------------------------------------------------


def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "name_piece", lambda *_: b"forged")


def test_texts_of_one_name_do_not_get_each_others_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    same_names(monkeypatch)

    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        for text in ("one", "another", "one"):
            tokenized = await tokenizing.tokenize(renderer, text)
            assert ids(tokenized) == renderer.encode(text, add_special_tokens=False)
        assert len(renderer.batches) == 3

    run(story)


def test_nor_do_they_while_one_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    same_names(monkeypatch)

    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        one, another = await asyncio.gather(
            tokenizing.tokenize(renderer, LONG), tokenizing.tokenize(renderer, "another")
        )
        assert ids(one) == renderer.encode(LONG, add_special_tokens=False)
        assert (ids(another), another.unknown_bytes) == ([], len("another"))

    run(story)


def test_nor_do_they_in_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    same_names(monkeypatch)

    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat("a" * 90, "b" * 90)
        tokenized = await tokenizing.tokenize(renderer, text)
        assert (ids(tokenized), tokenized.unknown_bytes) == ([], len(text))

    run(story)


@pytest.mark.parametrize("special", [False, True])
def test_c19_a_lone_surrogate_is_left_to_the_engine(special: bool) -> None:
    async def story(tokenizing: Tokenizing) -> None:
        for renderer in (watched(), watched(without_frame())):
            for tokenize in (tokenizing.tokenize, tokenizing.tokenize_beginning):
                with pytest.raises(PromptUnsupported) as raised:
                    await tokenize(renderer, "a \ud83d b", add_special_tokens=special)
                assert raised.value.reason == "lone_surrogate"
        assert is_at_rest(tokenizing)

    run(story)


# --- special tokens around a text -----------------------------------------------------------------


def with_frame(*templates: str) -> Tokenizer:
    tokenizer = byte_level([*CHATML.control_tokens, "<s>", "</s>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single=one, special_tokens=special) for one in templates]
    )
    return tokenizer


def without_frame() -> Tokenizer:
    """Return a tokenizer that puts <s> before each of two copies of the text."""
    return with_frame("<s> $A", "$A $A")


@pytest.mark.parametrize(
    "template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", "<s> <s> $A </s> </s>", "$A $A </s>"]
)
@pytest.mark.parametrize("text", ["", "a", "<s>", "</s>", "<s>a</s>", a_chat("b" * 90, "c" * 90)])
def test_special_tokens_stand_around_the_text(template: str, text: str) -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched(with_frame(template))
        for special in (True, False, True):
            tokenized = await tokenizing.tokenize(renderer, text, add_special_tokens=special)
            assert tokenized.is_whole
            assert ids(tokenized) == renderer.encode(text, add_special_tokens=special)
            assert len(tokenized.keys) == len(tokenized.pieces)

    run(story)


def test_a_frame_that_depends_on_the_text_is_encoded_with_it() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched(without_frame())
        assert renderer.frame is None
        tokenized = await tokenizing.tokenize(renderer, "ab", add_special_tokens=True)
        assert ids(tokenized) == renderer.encode("ab", add_special_tokens=True)
        assert renderer.batches == []

    run(story)


def test_a_text_that_is_not_ready_has_no_end() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched(with_frame("<s> $A </s>"))
        partial = await tokenizing.tokenize(renderer, LONG, add_special_tokens=True)
        assert (ids(partial), partial.is_whole) == (
            renderer.encode("<s>", add_special_tokens=False),
            False,
        )

    run(story, budget_s=1e-9)


# --- beginnings -----------------------------------------------------------------------------------


def test_a_beginnings_last_piece_is_not_known() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched(with_frame("<s> $A </s>"))
        pieces = renderer.boundaries.split(a_chat("a" * 90, "b" * 90))
        for special in (True, False):
            for count in range(1, len(pieces) + 1):
                text = "".join(pieces[:count])
                known = await tokenizing.tokenize_beginning(
                    renderer, text, add_special_tokens=special
                )
                assert known.unknown_bytes == len(pieces[count - 1])
                before = "<s>" if special else ""
                expected = before + "".join(pieces[: count - 1])
                assert ids(known) == renderer.encode(expected, add_special_tokens=False)

    run(story)


def test_of_a_beginning_whose_frame_depends_on_the_text_nothing_is_known() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched(without_frame())
        known = await tokenizing.tokenize_beginning(renderer, "ab", add_special_tokens=True)
        assert (known.pieces, known.unknown_bytes) == ([], 2)

    run(story)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_beginning_is_never_whole(text: str) -> None:
    async def story(tokenizing: Tokenizing) -> None:
        assert not (await tokenizing.tokenize_beginning(watched(), text)).is_whole

    run(story)


# --- any texts ------------------------------------------------------------------------------------

RENDERERS = [
    watched(),
    watched(with_frame("<s> $A </s>")),
    watched(word_piece(CHATML.control_tokens)),
]
hard_texts = st.lists(texts(CHATML.control_tokens), max_size=3).map(lambda parts: a_chat(*parts))


@settings(deadline=None)
@given(
    memory_bytes_max=st.sampled_from([0, 2_000, 1 << 24]),
    budget_s=st.sampled_from([1e-9, 10.0]),
    rounds=st.lists(
        st.lists(st.tuples(hard_texts, st.sampled_from(RENDERERS), st.booleans()), max_size=4),
        max_size=4,
    ),
)
def test_whatever_came_before_the_ids_are_those_of_the_whole_or_its_beginning(
    memory_bytes_max: int, budget_s: float, rounds: list[list[tuple[str, Watched, bool]]]
) -> None:
    async def story() -> None:
        tokenizing = Tokenizing(budget_s=budget_s, memory_bytes_max=memory_bytes_max)
        for jobs in rounds:
            results = await asyncio.gather(
                *(tokenizing.tokenize(r, text, add_special_tokens=s) for text, r, s in jobs)
            )
            for (text, renderer, special), result in zip(jobs, results, strict=True):
                expected = renderer.encode(text, add_special_tokens=special)
                known = ids(result)
                assert known == (expected if result.is_whole else expected[: len(known)])
                assert result.is_whole or budget_s < 1
            await all_done(tokenizing)
            assert is_at_rest(tokenizing)
            assert tokenizing.memory.bytes_used <= memory_bytes_max
        tokenizing.close()

    asyncio.run(story())


def test_what_is_remembered_under_a_salt_is_found_under_the_same_only() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer, text = watched(), a_chat("a" * 90, "b" * 90)
        for salt in (None, "t1", "t2", "t1", None):
            assert (await tokenizing.tokenize(renderer, text, salt=salt)).is_whole
        assert len(renderer.batches) == 3

    run(story)


def test_a_short_text_is_worth_one_thread_and_a_long_one_several() -> None:
    async def story(tokenizing: Tokenizing) -> None:
        renderer = watched()
        await tokenizing.tokenize(renderer, a_chat(*[f"{n} {'x ' * 2500}" for n in range(3)]))
        assert len(renderer.batches) == 1
        tokenizing.effort.threads = 2
        await tokenizing.tokenize(renderer, a_chat(*[f"{n} {'y ' * 2500}" for n in range(9)]))
        assert len(renderer.batches) == 3

    run(story)
