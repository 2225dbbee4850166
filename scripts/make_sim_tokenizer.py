#!/usr/bin/env python3
"""Make the tokenizer that simulated engines use when none is given: `simulator/model/tokenizer.json`.

A byte-level BPE with 2,048 entries, trained on the source text of Python's standard library, so
that nothing has to be downloaded and prompts of prose or code take a plausible number of tokens.
Deterministic for one Python release and one release of `tokenizers`; the result is checked in and
this script is only run to change it. `chat_template.jinja` and `tokenizer_config.json` beside it
are written by hand.

Usage: python3 scripts/make_sim_tokenizer.py [--out DIR]
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_TOKENS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FILE_BYTES_MAX = 200_000
"""The wheel carries the file."""

TRAINING_PATTERNS = ("*.py", "json/*.py", "email/*.py", "asyncio/*.py", "http/*.py")
"""Enough text for 2,048 entries; the whole library would only take longer."""


def read_sources(library: Path) -> Iterator[str]:
    """Yield the training text in a fixed order: equal counts are broken by what came first."""
    for pattern in TRAINING_PATTERNS:
        for path in sorted(library.glob(pattern)):
            yield path.read_text(encoding="utf-8", errors="replace")


def train(library: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_sources(library), trainer)
    return tokenizer


def main() -> None:
    default_out = Path(__file__).resolve().parent.parent / "simulator" / "model"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_out, help="default: %(default)s")
    out: Path = parser.parse_args().out
    tokenizer = train(Path(sysconfig.get_path("stdlib")))
    assert tokenizer.get_vocab_size() == VOCABULARY_TOKENS, tokenizer.get_vocab_size()
    text = tokenizer.to_str(pretty=False)
    assert len(text.encode()) < FILE_BYTES_MAX, len(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    print(f"{out / 'tokenizer.json'}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
