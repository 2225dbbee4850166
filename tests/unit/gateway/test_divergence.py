"""Turns that don't begin like the turn before: where, why, and what it costs."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.prompts.divergence import SESSIONS_MAX, Divergence, Divergences
from moongate.gateway.prompts.prompt_outline import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    PARTS_MAX,
    Cause,
    Difference,
    TextMemory,
    find_difference,
    outline_of,
)
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.model import TEXT_SPACE

SPACE = BlockSpace(16)
SYSTEM = {"role": "system", "content": "You are an agent. " * 40}
USER = {"role": "user", "content": "first " * 300}
ANSWER = {"role": "assistant", "content": "yes " * 100}
MORE = {"role": "user", "content": "more " * 100}
TOOLS = [{"type": "function", "function": {"name": name}} for name in "abc"]


def prompt_of(fields: dict[str, Any], salt: str | None = None) -> Prompt:
    """Return a prompt of a token a byte: tools first, then messages."""
    text = repr(fields.get("tools")) + "".join(repr(m) for m in fields["messages"])
    tokens = pack_tokens([ord(c) % 256 for c in text])
    return Prompt(len(text), {SPACE: hash_prompt(SPACE, tokens, salt)})


class Sessions:
    """Divergences, and what was reported."""

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.reported: list[Divergence] = []
        self.divergences = Divergences(self.reported.append, keeps_text=keeps_text)

    def turn(
        self, *messages: Any, tools: Any = None, salt: str | None = None, key: str = "s"
    ) -> Divergence | None:
        fields = {"messages": [*messages], **({"tools": tools} if tools else {})}
        return self.divergences.note(key, "m", fields, salt, prompt_of(fields, salt))


def test_a_turn_that_goes_on_has_not_diverged() -> None:
    sessions = Sessions()
    assert sessions.turn(SYSTEM, USER) is None
    assert sessions.turn(SYSTEM, USER, ANSWER, MORE) is None
    assert sessions.turn(SYSTEM, USER, ANSWER, MORE) is None
    assert sessions.reported == []


def test_a_changed_system_prompt_is_told_with_its_place() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER, MORE)
    at = 200
    changed = {**SYSTEM, "content": SYSTEM["content"][:at] + "!" + SYSTEM["content"][at + 1 :]}
    found = sessions.turn(changed, USER, ANSWER, MORE)
    assert found is not None
    assert found.difference == Difference(
        Cause.SYSTEM, 0, "system", at // CHUNK_BYTES * CHUNK_BYTES, len(SYSTEM["content"]),
        len(SYSTEM["content"]),
    )  # fmt: skip
    assert sessions.reported == [found]
    assert found.shared_tokens < 300 < found.lost_tokens
    told = found.as_json()
    assert told["cause"] == "system"
    assert "agent" not in repr(told), "no text is told"


def test_where_texts_are_kept_the_very_byte_is_told() -> None:
    sessions = Sessions(keeps_text=True)
    sessions.turn(SYSTEM, USER, ANSWER, MORE)
    changed = {**USER, "content": USER["content"].replace("first", "other", 1)}
    found = sessions.turn(SYSTEM, changed, ANSWER, MORE)
    assert found is not None
    difference = found.difference
    assert (difference.cause, difference.message, difference.byte) == (Cause.HISTORY, 1, 0)
    assert (difference.text_before or "").startswith("first first")
    assert (difference.text_now or "").startswith("other first")


@pytest.mark.parametrize(
    ("tools", "cause"),
    [
        (TOOLS[::-1], Cause.TOOLS_ORDER),
        (TOOLS[:2], Cause.TOOLS),
        (None, Cause.TOOLS),
        ([*TOOLS, TOOLS[0]], Cause.TOOLS),
    ],
)
def test_changed_tools_are_told_from_reordered_ones(tools: Any, cause: Cause) -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER, tools=TOOLS)
    found = sessions.turn(SYSTEM, USER, ANSWER, MORE, tools=tools)
    assert found is not None
    assert found.difference == Difference(cause)


def test_another_salt_is_told() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, salt="a")
    found = sessions.turn(SYSTEM, USER, ANSWER, MORE, salt="b")
    assert found is not None
    assert (found.difference, found.shared_tokens) == (Difference(Cause.SALT), 0)


def test_the_same_messages_rendered_otherwise_are_the_templates() -> None:
    sessions = Sessions()
    fields = {"messages": [SYSTEM, USER, ANSWER]}
    sessions.divergences.note("s", "m", fields, None, prompt_of(fields))
    longer = {"messages": [SYSTEM, USER, ANSWER, MORE]}
    rendered = prompt_of({"messages": [SYSTEM, {"role": "user", "content": "x"}, ANSWER, MORE]})
    found = sessions.divergences.note("s", "m", longer, None, rendered)
    assert found is not None
    assert found.difference == Difference(Cause.TEMPLATE)


def test_a_truncated_history_is_told() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER, MORE)
    found = sessions.turn(SYSTEM, ANSWER, MORE)
    assert found is not None
    assert (found.difference.cause, found.difference.message) == (Cause.HISTORY, 1)
    assert found.difference.byte is None
    shorter = Sessions()
    shorter.turn(SYSTEM, USER, ANSWER, MORE)
    cut = shorter.turn(SYSTEM, USER)
    assert cut is not None
    assert cut.difference == Difference(Cause.HISTORY, 2, "assistant", None, 400)


def test_a_small_loss_is_no_divergence() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER)
    assert sessions.turn(SYSTEM, USER, {**ANSWER, "content": "no"}) is not None
    sessions.turn(SYSTEM, USER, {"role": "assistant", "content": "ab"}, key="t")
    assert sessions.turn(SYSTEM, USER, {"role": "assistant", "content": "no"}, key="t") is None


def test_a_sub_agent_under_its_parents_key_is_another_line() -> None:
    sessions = Sessions()
    other = {"role": "system", "content": "You are a sub-agent. " * 40}
    task = {"role": "user", "content": "task " * 300}
    assert sessions.turn(SYSTEM, USER) is None
    assert sessions.turn(other, task) is None
    assert sessions.turn(SYSTEM, USER, ANSWER, MORE) is None
    assert sessions.turn(other, task, ANSWER) is None
    assert sessions.reported == []


def test_sessions_and_models_are_apart() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER)
    assert sessions.turn(SYSTEM, {**USER, "content": "x" * 999}, ANSWER, key="t") is None
    fields = {"messages": [SYSTEM, {**USER, "content": "x" * 999}, ANSWER]}
    assert sessions.divergences.note("s", "n", fields, None, prompt_of(fields)) is None


def test_a_dry_run_is_not_remembered() -> None:
    sessions = Sessions()
    assert (
        sessions.divergences.explain(
            "s", "m", {"messages": [USER]}, None, prompt_of({"messages": [USER]})
        )
        is None
    )
    sessions.turn(SYSTEM, USER, ANSWER)
    changed = {"messages": [{**SYSTEM, "content": "x" * 900}, USER, ANSWER, MORE]}
    for _ in range(2):
        found = sessions.divergences.explain("s", "m", changed, None, prompt_of(changed))
        assert found is not None
        assert found.difference.cause is Cause.SYSTEM
    assert sessions.reported == []
    assert sessions.turn(SYSTEM, USER, ANSWER, MORE) is None


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(100, {TEXT_SPACE: prompt_of({"messages": [USER]}).chains[SPACE]}, is_exact=False),
        Prompt(100, {SPACE: prompt_of({"messages": [USER]}).chains[SPACE]}, is_exact=False),
        Prompt(4, {SPACE: []}),
        Prompt(4, {}),
    ],
)
def test_what_is_not_known_exactly_is_passed_over(prompt: Prompt) -> None:
    sessions = Sessions()
    sessions.turn(USER, ANSWER)
    assert sessions.divergences.note("s", "m", {"messages": [MORE]}, None, prompt) is None
    assert sessions.turn(USER, ANSWER, MORE) is None


def test_the_longest_unused_sessions_are_forgotten() -> None:
    sessions = Sessions()
    sessions.turn(SYSTEM, USER, ANSWER)
    for number in range(SESSIONS_MAX):
        sessions.turn(USER, key=str(number))
    assert sessions.turn(SYSTEM, {**USER, "content": "x" * 999}, ANSWER) is None


# --- outlines -------------------------------------------------------------------------------------

TEXTS = st.text(max_size=300)


@settings(deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_the_place_of_a_change_is_known_to_a_chunk(
    common: str, one: str, other: str, keeps_text: bool
) -> None:
    texts = TextMemory(1 << 20, keeps_text=keeps_text)
    before, now = (
        outline_of({"messages": [{"role": "user", "content": common + tail}]}, None, texts)
        for tail in (one, other)
    )
    assert before is not None
    assert now is not None
    found = find_difference(before, now, texts)
    if one == other:
        assert found is None
        return
    assert found is not None
    pairs = zip((common + one).encode(), (common + other).encode(), strict=False)
    true = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    step = 1 if keeps_text else CHUNK_BYTES
    assert found.byte == true // step * step


def test_texts_are_kept_within_bounds() -> None:
    texts = TextMemory(300, keeps_text=True)
    first = texts.note("user", "a" * 60)
    second = texts.note("user", "b" * 60)
    assert texts.bytes_used == ENTRY_BYTES + 60
    assert texts.first_difference(first, second) == (None, None, None)


@pytest.mark.parametrize(
    "content",
    [None, 3, [{"type": "text", "text": "x"}], {"a": "\ud800"}, "\ud800"],
)
def test_any_content_has_a_mark(content: Any) -> None:
    texts = TextMemory(1000, keeps_text=False)
    message = {"role": "user", "content": content, "name": "n"}
    one, same = (outline_of({"messages": [message, 3]}, None, texts) for _ in range(2))
    assert one == same
    assert one is not None
    assert [mark.role for mark in one.messages] == ["user", ""]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [3] * (PARTS_MAX + 1)},
        {"messages": [USER], "tools": 5},
        {"messages": "x"},
    ],
)
def test_of_what_is_no_conversation_or_too_long_there_is_no_outline(fields: Any) -> None:
    assert outline_of(fields, None, TextMemory(1000, keeps_text=False)) is None
    sessions = Sessions()
    prompt = prompt_of({"messages": [USER]})
    assert sessions.divergences.note("s", "m", fields, None, prompt) is None


def test_what_is_nested_too_deeply_has_a_mark_all_the_same() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    texts = TextMemory(1000, keeps_text=False)
    assert outline_of({"messages": [{"role": "user", "content": deep}]}, None, texts) is not None
