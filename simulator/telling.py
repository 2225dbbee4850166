"""From a chat request to the tokens of its answers, where a script or its constraints give them."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.simulator.answering import find_answer, read_question
from moongate.simulator.raw_answer import RawAnswer, write_answer
from moongate.simulator.script import Script


class Teller:
    """Knows what the model says. Thread-safe."""

    def __init__(self, renderer: ModelRenderer, script: Script | None) -> None:
        self._renderer = renderer
        self._script = script

    def answers(
        self, chat: Mapping[str, Any], prompt_token_ids: Sequence[int], choices: int
    ) -> tuple[RawAnswer, ...]:
        """Return the answers to a chat whose prompt is rendered; empty: the model says anything.

        Raises: ApiError, RenderError.
        """
        question = read_question(chat)
        answer = find_answer(self._script, question)
        if answer is None:
            return ()
        prompt = array("Q", prompt_token_ids).tobytes()
        return tuple(
            write_answer(
                answer,
                [_call_id(prompt, choice, n) for n in range(len(answer.calls))],
                self._renderer,
                chat,
                is_forced=bool(question.forced),
                is_named=isinstance(chat.get("tool_choice"), dict),
            )
            for choice in range(choices)
        )


def _call_id(prompt: bytes, choice: int, number: int) -> str:
    """Return an id that the same call always gets, and that no other call in its conversation has.

    *Why* not at random, as in the engine: some templates render ids, and then tokens depend on them.
    """
    seed = prompt + repr((choice, number)).encode()
    return f"chatcmpl-tool-{hashlib.blake2b(seed, digest_size=8).hexdigest()}"
