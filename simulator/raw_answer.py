"""An answer as the model says it, token by token, and what of it is told to the client when. Pure.

A model doesn't say "a call": it says text, in the form in which its chat template writes what was said
before, and a parser of the engine finds the parts. Here both come from one place: the raw text is what
the template makes of the answer's message, so the next turn's prompt has the same tokens again, as far
as the template keeps them; and each part is told when the tokens that hold it are there.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moongate.engine_plugins.vllm_render import ModelRenderer, RenderError
from moongate.simulator.script import Answer

_ASKED = {"role": "user", "content": "?"}

_KEPT_FIELDS = ("tools", "chat_template_kwargs", "reasoning_effort")
"""Fields of a request on which the form of an answer may depend."""

_THINK, _THOUGHT = "<think>\n", "\n</think>\n\n"


class Field(Enum):
    """What a part of an answer is told as."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer and its place in the raw text: characters from `start` up to `end`."""

    field: Field
    start: int
    end: int
    text: str
    call: int = -1
    """Of the call that it belongs to, its number in the answer."""

    @property
    def grows(self) -> bool:
        """Whether it is told as it comes, character by character; else in one go at its end."""
        return self.end - self.start == len(self.text) and self.field is not Field.CALL


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What is sampled, and what it means."""

    answer: Answer
    call_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    """The end-of-turn token is the last, unless the answer breaks off."""
    ends: tuple[int, ...]
    """How many characters of `text` there are after each token."""
    text: str
    pieces: tuple[Piece, ...]
    is_forced: bool
    """The request left the model no choice but to call."""
    is_named: bool
    """It named one tool."""

    @property
    def finish_reason(self) -> str:
        """Return why it ends, when it ends by itself."""
        if not self.answer.calls or self.is_named:
            return "stop"
        return "tool_calls"

    def arguments(self, call: int) -> str:
        """Return the arguments of a call as clients get them."""
        return _dump(self.answer.calls[call].arguments)

    def visible(self, tokens: int) -> int:
        """Return how many characters there are after so many tokens."""
        return self.ends[tokens - 1] if tokens else 0

    def between(self, before: int, after: int) -> Iterator[tuple[Piece, str]]:
        """Yield what is told when the raw text grows from `before` characters to `after`."""
        for piece in self.pieces:
            if piece.grows:
                start, end = max(piece.start, before), min(piece.end, after)
                if start < end:
                    yield piece, self.text[start:end]
            elif before < piece.end <= after:
                yield piece, piece.text

    def breaks_in_call(self, characters: int) -> bool:
        """Tell whether some call has begun, but isn't complete, after so many characters."""
        pieces = self.pieces
        begun = {p.call for p in pieces if p.field is Field.CALL and p.start < characters}
        return any(p.call in begun and p.end > characters for p in pieces)

    @property
    def text_start(self) -> int:
        """Return where the raw text goes on behind the reasoning."""
        return next((p.end for p in self.pieces if p.field is Field.REASONING), 0)

    @property
    def reasoning_tokens(self) -> int:
        return bisect_right(self.ends, self.text_start) if self.text_start else 0


def write_answer(
    answer: Answer,
    call_ids: Sequence[str],
    renderer: ModelRenderer,
    chat: Mapping[str, Any],
    *,
    is_forced: bool,
    is_named: bool,
) -> RawAnswer:
    """Return the tokens of an answer to `chat`. Raises: RenderError."""
    text = _as_rendered(answer, call_ids, renderer, chat)
    pieces = None if text is None else find_pieces(answer, text)
    if text is None or pieces is None:
        text = _plain(answer)
        pieces = find_pieces(answer, text)
        assert pieces is not None, "it is made of them"
    token_ids, ends = renderer.encode_with_ends(text)
    end_token = renderer.end_token
    if end_token is not None and answer.finish == "stop":
        token_ids, ends = [*token_ids, end_token.id], [*ends, len(text)]
    return RawAnswer(
        answer=answer,
        call_ids=tuple(call_ids),
        token_ids=tuple(token_ids),
        ends=tuple(ends),
        text=text,
        pieces=tuple(pieces),
        is_forced=is_forced,
        is_named=is_named,
    )


def _as_rendered(
    answer: Answer, call_ids: Sequence[str], renderer: ModelRenderer, chat: Mapping[str, Any]
) -> str | None:
    """Return what the template makes of the answer. None: it doesn't just add it to what was said."""
    fields = {name: chat[name] for name in _KEPT_FIELDS if chat.get(name) is not None}
    said: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        said["reasoning"] = answer.reasoning
    if answer.calls:
        said["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call_id, call in zip(call_ids, answer.calls, strict=True)
        ]
    try:
        opening = renderer.chat_text({**fields, "messages": [_ASKED]})
        whole = renderer.chat_text(
            {**fields, "messages": [_ASKED, said], "add_generation_prompt": False}
        )
    except RenderError:
        return None
    if not whole.startswith(opening):
        return None
    raw = whole[len(opening) :]
    end_token = renderer.end_token
    if end_token is not None and end_token.text in raw:
        raw = raw.rpartition(end_token.text)[0]
    if answer.reasoning and answer.reasoning not in raw:
        # The template leaves it out, but the model says it; the next turn's prompt differs here.
        is_open = opening.rstrip().endswith(_THINK.strip())
        raw = ("" if is_open else _THINK) + answer.reasoning + _THOUGHT + raw
    return raw


def _plain(answer: Answer) -> str:
    """Return an answer in the form that most models have learned."""
    thought = _THINK + answer.reasoning + _THOUGHT if answer.reasoning else ""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {_dump(call.arguments)}}}'
        "\n</tool_call>"
        for call in answer.calls
    ]
    return thought + "\n".join([*([answer.text] if answer.text else []), *calls])


def _dump(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def find_pieces(answer: Answer, raw: str) -> list[Piece] | None:
    """Return the parts of an answer in its raw text; None if some isn't there."""
    pieces: list[Piece] = []
    at = 0
    for field, text in ((Field.REASONING, answer.reasoning), (Field.TEXT, answer.text)):
        if not text:
            continue
        start = raw.find(text, at)
        if start < 0:
            return None
        at = start + len(text)
        pieces.append(Piece(field, start, at, text))
    places = _find_calls(answer, raw, at)
    if places is None:
        return None
    nexts = [place.start for place in places[1:]] + [len(raw)]
    for n, (place, following, call) in enumerate(zip(places, nexts, answer.calls, strict=False)):
        pieces.append(Piece(Field.CALL, place.start, place.end, call.name, n))
        # Arguments in another form are told when the call is complete.
        first, last = place.arguments or (following, following)
        pieces.append(Piece(Field.ARGUMENTS, first, last, _dump(call.arguments), n))
    return pieces


@dataclass(frozen=True, slots=True)
class _CallPlace:
    """Where a call stands in the raw text: its name from `start` up to `end`."""

    start: int
    end: int
    arguments: tuple[int, int] | None
    """From and up to; None: the template writes them in another form than ours."""


def _find_calls(answer: Answer, raw: str, at: int) -> list[_CallPlace] | None:
    """Return where the calls stand; None if some name isn't there."""
    places = []
    for call in answer.calls:
        start = raw.find(f'"{call.name}"', at)
        start = start + 1 if start >= 0 else raw.find(call.name, at)
        if start < 0:
            return None
        end = start + len(call.name)
        arguments = _dump(call.arguments)
        found = raw.find(arguments, end)
        # The next name is looked for behind these arguments, in which it may stand, too.
        at = end if found < 0 else found + len(arguments)
        places.append(_CallPlace(start, end, (found, at) if found >= 0 else None))
    return places
