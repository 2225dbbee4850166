"""Text of a known number of tokens, made from a name: the same name gives the same text, everywhere.

Every word here, with the space before it, is one token of the simulated engines' tokenizer; so are the
first words without one, as they stand at a message's beginning. They are common English words, one
token each for larger tokenizers too (tried: Mistral's, of either kind). What a model's chat template
adds, and how far its tokenizer departs from one token a word, is measured before a run (`TokenCosts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import shake_128


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS: tuple[str, ...] = _words(
    """
    act action add address after all allow also always and any are argument arguments
    available back base because been before binary block bound break buffer but byte bytes
    call called can cannot case change check child class classes close closed code command
    connection context continue cookie copy count create current data date default directory
    does domain each either else email empty encoding end entry error errors event example
    except exception extra field fields file files find first flag follow for format found
    frame from full function functions get given global group handle has have header headers
    help here host ignore import index info input instance instead integer into item items its
    just key last length level like limit line lines list load local lock log look loop mail
    make man mark match may mean member message method methods mode module month more must
    name names need new next node not number object objects off old one only open option order
    other otherwise out output over pack parent part parts pass path per point port position
    prefix print process protocol raise range raw read request response rest result return
    returns root run same section see select self sequence server set should sign size some
    source stack start state stop stream string support target task test text than that the
    then there they this thread time token top transport true try two type types until use
    used user using value values variable version wait was when where which while width will
    with without work wrap write yield you
    """
)
"""256, so that a byte chooses one."""

FIRST_WORDS: tuple[str, ...] = _words(
    """
    act action add address all and are argument back base block buffer bytes call can check
    class close closed code command context copy count create current data date default domain
    encoding end error errors event exception field file find for format frame from get global
    group handle has header headers help host import index info instance item items its key
    length level like limit line lines list load local lock log loop mail make match member
    message method mode module month name names new next node not number object off old one
    only open option other out pack part parts path per point port position prefix print
    process protocol raw read request result return root run section select self server set
    sign size source stack start state stream
    """
)
"""128, which are one token without a space before them, too."""


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What a prompt takes beside the words, in tokens of the model. Measured; the defaults are the
    simulated engines'."""

    per_word: float = 1.0
    per_message: int = 5
    """What the chat template puts around a message."""
    per_answer: int = 6
    """What it puts around an assistant's."""
    per_request: int = 3
    """What it puts around a prompt: the beginning, and the opening of the answer."""
    tools: int = 0
    """What the offered tools take."""

    def words_for(self, tokens: float) -> int:
        """Return how many words take so many tokens, at least one."""
        return max(round(tokens / self.per_word), 1)


SIMULATED_COSTS = TokenCosts()


def make_words(name: str, count: int) -> list[str]:
    """Return so many words, chosen by the name; the first fits at a message's beginning."""
    chosen = shake_128(name.encode()).digest(count)
    words = [WORDS[byte] for byte in chosen]
    if count:
        words[0] = FIRST_WORDS[chosen[0] % len(FIRST_WORDS)]
    return words


def make_text(name: str, count: int) -> str:
    return join(make_words(name, count))


def join(words: Iterable[str]) -> str:
    return " ".join(words)
