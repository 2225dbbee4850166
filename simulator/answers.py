"""The answers to one request while they grow: tokens in, what clients are told of them out. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moongate.simulator.engine import FinishReason, TokenOutput
from moongate.simulator.openai_wire import CallDelta, CalledTool, Choice, Delta, Usage
from moongate.simulator.raw_answer import Field, RawAnswer


class Answers:
    """The answers to one request while they grow."""

    def __init__(
        self,
        places: Mapping[str, tuple[int, int]],
        prompts: Sequence[Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        raw_answers: Sequence[RawAnswer] = (),
        cached_elsewhere_tokens: int | None = None,
    ) -> None:
        """`places`: engine request id -> (index of its prompt, index of its answer).

        `raw_answers`: what the answers will be, by index, if that is known. `cached_elsewhere_tokens`:
        what a prefill engine had cached, told in place of our own.
        """
        self.prompts = prompts
        self._cached_elsewhere_tokens = cached_elsewhere_tokens
        self._places = places
        self._decode = decode
        self._raw_answers = raw_answers
        self._token_ids: list[list[int]] = [[] for _ in places]
        self._pieces: list[list[str]] = [[] for _ in places]
        self._finish_reasons: dict[int, str] = {}
        self._cached_tokens: list[int | None] = [None for _ in places]

    def add(self, output: TokenOutput) -> Delta:
        prompt_index, index = self._places[output.request_id]
        token_ids = self._token_ids[index]
        is_first = not token_ids
        piece = "" if self._raw_answers else self._decode_next(token_ids, output.token_id)
        token_ids.append(output.token_id)
        self._pieces[index].append(piece)
        self._cached_tokens[index] = output.cached_tokens
        if output.finish_reason is not None:
            self._finish_reasons[index] = self._finish_reason(index, output.finish_reason)
        delta = Delta(
            index=index,
            text=piece,
            token_id=output.token_id,
            finish_reason=self._finish_reasons.get(index),
            prompt_token_ids=self.prompts[prompt_index] if is_first else None,
        )
        if not self._raw_answers:
            return delta
        return _with_parts(delta, self._raw_answers[index], len(token_ids))

    def _finish_reason(self, index: int, reason: FinishReason) -> str:
        is_end = reason is FinishReason.STOP and self._raw_answers
        return self._raw_answers[index].finish_reason if is_end else reason.value

    def _decode_next(self, token_ids: Sequence[int], token_id: int) -> str:
        """Decode one token after the one before it: some tokenizers drop a space at the start.

        More context isn't needed, since only tokens that are whole characters are sampled.
        """
        before = token_ids[-1:]
        skipped = len(self._decode(before)) if before else 0
        return self._decode([*before, token_id])[skipped:]

    def running_usage(self, output: TokenOutput) -> Usage:
        """Usage of the one answer that `output` belongs to, so far."""
        prompt_index, index = self._places[output.request_id]
        return Usage(len(self.prompts[prompt_index]), len(self._token_ids[index]), None)

    def usage(self) -> Usage:
        """Usage of all answers. Cached tokens are those of the last prompt, as in vLLM."""
        choices_per_prompt = len(self._places) // len(self.prompts)
        cached_tokens = self._cached_elsewhere_tokens
        if cached_tokens is None:
            cached_tokens = self._cached_tokens[-choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            completion_tokens=sum(len(token_ids) for token_ids in self._token_ids),
            cached_tokens=cached_tokens,
        )

    def choices(self) -> list[Choice]:
        """Return the answers, all of which have ended."""
        prompt_indexes = [prompt_index for prompt_index, _ in self._places.values()]
        return [
            self._choice(index, prompt_index) for index, prompt_index in enumerate(prompt_indexes)
        ]

    def _choice(self, index: int, prompt_index: int) -> Choice:
        choice = Choice(
            prompt_token_ids=self.prompts[prompt_index],
            text="".join(self._pieces[index]),
            token_ids=self._token_ids[index],
            finish_reason=self._finish_reasons[index],
        )
        return _with_meaning(choice, self._raw_answers[index]) if self._raw_answers else choice


def _with_parts(delta: Delta, raw: RawAnswer, tokens: int) -> Delta:
    """Return the delta of the last of so many tokens with what they mean."""
    text = reasoning = ""
    calls: list[CallDelta] = []
    for piece, told in raw.between(raw.visible(tokens - 1), raw.visible(tokens)):
        match piece.field:
            case Field.TEXT:
                text += told
            case Field.REASONING:
                reasoning += told
            case Field.CALL:
                calls.append(CallDelta(piece.call, "", raw.call_ids[piece.call], told))
            case Field.ARGUMENTS:
                calls.append(CallDelta(piece.call, told))
    return replace(delta, text=text, reasoning=reasoning, calls=tuple(calls))


def _with_meaning(choice: Choice, raw: RawAnswer) -> Choice:
    """Return a whole answer with what its tokens mean, which may have come to their limit before.

    A call that breaks off is no call: it stays the text that the model said, as in the engine.
    """
    visible = raw.visible(len(choice.token_ids))
    told = dict.fromkeys((Field.TEXT, Field.REASONING), "")
    calls: list[CalledTool] = []
    for piece, part in raw.between(0, visible):
        if piece.field in told:
            told[piece.field] += part
        elif piece.field is Field.CALL:
            calls.append(CalledTool(raw.call_ids[piece.call], part, raw.arguments(piece.call)))
    if raw.breaks_in_call(visible):
        calls.clear()
        told[Field.TEXT] = raw.text[raw.text_start : visible]
    has_text = bool(told[Field.TEXT]) or not calls or raw.is_forced
    return replace(
        choice,
        text=told[Field.TEXT] if has_text else None,
        reasoning=told[Field.REASONING],
        reasoning_tokens=min(raw.reasoning_tokens, len(choice.token_ids)),
        calls=tuple(calls),
    )
