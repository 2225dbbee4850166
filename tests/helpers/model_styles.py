"""Models as they come: chat templates with their control tokens, tokenizers of every build, and talk.

The templates are written for these tests after those of the families that name them; the tokenizers
are made here too, so that nothing has to be downloaded. The texts are what is hard for tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

import moongate.simulator
from moongate.engine_plugins.chat_template import ChatTemplate
from moongate.engine_plugins.vllm_render import ModelRenderer

SIMULATOR_MODEL = Path(moongate.simulator.__file__).parent / "model"
CACHED_MODELS = Path.home() / ".cache" / "moongate" / "models"

Message = dict[str, Any]
R = TypeVar("R", bound=ModelRenderer)

# --- templates ------------------------------------------------------------------------------------

CHATML = (SIMULATOR_MODEL / "chat_template.jinja").read_text(encoding="utf-8")
"""`<|im_start|>`, with tools and calls as JSON in the text."""

LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) ~ '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system_message ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ message.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name }}
        {{- '", "parameters": ' ~ call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Two control tokens round the role, content trimmed."""

QWEN_3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nReturn <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(seeks=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.seeks and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.seeks = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Drops the thoughts before the last question, joins the results of several calls."""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content ~ '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (system if loop.last else '') ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson ~ (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content | tojson ~ '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' ~ message.content | trim ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""Moves the system's words and the tools to the last question, so a history is not a beginning."""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' ~ message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' ~ (message.content or '').split('</think>')[-1] }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁call▁begin｜>' ~ call.function.name ~ '\\n```json\\n' }}
            {{- call.function.arguments | tojson ~ '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""
"""Control tokens beyond ASCII, nothing between messages."""


@dataclass(frozen=True, slots=True)
class Style:
    """A template, its control tokens, and those it knows by name."""

    template: str
    control_tokens: tuple[str, ...]
    bos_token: str = ""
    eos_token: str = ""

    def renderer(self, tokenizer: Tokenizer, kind: type[R]) -> R:
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        templates = {"default": ChatTemplate(self.template)}
        return kind(tokenizer, templates, {k: v for k, v in special.items() if v})


STYLES: Mapping[str, Style] = {
    "chatml": Style(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "", "<|im_end|>"),
    "llama_3": Style(
        LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "qwen_3": Style(
        QWEN_3,
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
         "<tool_response>", "</tool_response>"),
        "",
        "<|im_end|>",
    ),
    "mistral": Style(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "<s>",
        "</s>",
    ),
    "deepseek": Style(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>",
         "<｜tool▁output▁end｜>", "<think>", "</think>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
}  # fmt: skip

# --- tokenizers -----------------------------------------------------------------------------------

CORPUS = (
    "The quick brown fox's tail isn't 12,345 feet long; def f(x): return x + 1\n\n\tfor i in range",
    "user assistant system tool tools name arguments content parameters type function object json",
    "Grüße aus Köln, où ça va? ¿Qué tal? Привет, мир! Γειά σου Κόσμε, नमस्ते दुनिया, สวัสดีชาวโลก",
    "世界你好，这是一个测试。日本語のテキスト、カタカナ。 한국어 텍스트입니다. مرحبا بالعالم שלום עולם",
    "🙂 👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 A\u030a ﬁ Ⅳ ① ½ … — “quoted” <|im_|> [INST <s </ < | > x< {'a': [1, 2]}",
)

Added = str | AddedToken


def add(tokenizer: Tokenizer, tokens: Sequence[Added]) -> Tokenizer:
    """Give a tokenizer these tokens; texts become control tokens as models have them."""
    for token in tokens:
        if isinstance(token, str):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def byte_level(tokens: Sequence[Added], *, prefix_space: bool = False) -> Tokenizer:
    """GPT-2's build, with which most models come."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=prefix_space)
    alphabet = sorted(pre.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return add(tokenizer, tokens)


def sentencepiece_bpe(tokens: Sequence[Added], scheme: str) -> Tokenizer:
    """Llama 2's build as it is now: words begin with ▁, put there by the pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return add(tokenizer, tokens)


def legacy_llama(tokens: Sequence[Added]) -> Tokenizer:
    """Llama 2's build as it was: a normalizer puts ▁ before each stretch of text."""
    tokenizer = sentencepiece_bpe((), "always")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return add(tokenizer, tokens)


def unigram(tokens: Sequence[Added], scheme: str) -> Tokenizer:
    """T5's build, with NFKC, which makes some characters of others."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return add(tokenizer, tokens)


def word_piece(tokens: Sequence[Added]) -> Tokenizer:
    """BERT's build: letters lower-cased, accents stripped, its own frame round each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    names = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    ends = [(name, names.index(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return add(tokenizer, tokens)


def stripping(tokens: Sequence[Added]) -> Tokenizer:
    """Cuts white space off each stretch of text."""
    tokenizer = byte_level(())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    return add(tokenizer, tokens)


def splitting(tokens: Sequence[Added]) -> Tokenizer:
    """Qwen's build: words by a pattern of its own, NFC."""
    tokenizer = byte_level(())
    tokenizer.normalizer = normalizers.NFC()
    words = pre.Split(r" ?\w+| ?[^\s\w]+|\s+", "isolated")
    tokenizer.pre_tokenizer = pre.Sequence([words, pre.Digits(True), pre.ByteLevel(False)])
    return add(tokenizer, tokens)


def dropping(tokens: Sequence[Added], probability: float) -> Tokenizer:
    """Leaves merges out by chance."""
    tokenizer = byte_level(tokens)
    tokenizer.model.dropout = probability
    return tokenizer


def from_file(directory: Path, tokens: Sequence[Added]) -> Tokenizer:
    return add(Tokenizer.from_file(str(directory / "tokenizer.json")), tokens)


BUILDS: Mapping[str, Callable[[Sequence[Added]], Tokenizer]] = {
    "simulator": lambda tokens: from_file(SIMULATOR_MODEL, tokens),
    "byte_level": byte_level,
    "byte_level_prefix_space": lambda tokens: byte_level(tokens, prefix_space=True),
    "splitting": splitting,
    "stripping": stripping,
    "bpe_first": lambda tokens: sentencepiece_bpe(tokens, "first"),
    "bpe_always": lambda tokens: sentencepiece_bpe(tokens, "always"),
    "bpe_never": lambda tokens: sentencepiece_bpe(tokens, "never"),
    "legacy_llama": legacy_llama,
    "unigram_first": lambda tokens: unigram(tokens, "first"),
    "unigram_always": lambda tokens: unigram(tokens, "always"),
    "word_piece": word_piece,
}

# --- talk -----------------------------------------------------------------------------------------

HARD_TEXTS = (
    *("", " ", "\n", "\n\n", "\r\n", "\t", "  \n ", " ", "\u3000", "\u200b", "\ufeff"),
    *("a", " a", "a ", "Hello, world!", "isn't", "'s", "B.C", "x" * 300, "1234567890", "3.14", "_"),
    *("Grüße", "e\u0301", "\u0301", "a\u0301\u0327", "Привет", "世界", "日本語。", "한국어", "नमस्ते"),
    *("مرحبا", "שלום", "สวัสดี", "ﬁ", "①", "İ", "ß", "\u202e", "▁", "▁a", "Ġa", "##a"),
    *("🙂", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "\U0001f469\u200d", "\ufe0f", "\x00", "\x07", "\x1b[0m", "\x7f"),
    *("<", "<|", "|>", "<|im", "<|im_start", "im_start|>", "[", "[/", "[INST", "</", "x<", "<｜"),
    *("<think>", "</think>", "<s>", "[UNK]", "{", '{"a": [1, 2]}', "def f(x):\n\treturn x\n"),
)  # fmt: skip


def texts(markers: Sequence[str]) -> st.SearchStrategy[str]:
    """Return texts of what is hard, with the control tokens themselves in them, whole and in parts."""
    parts = [marker[:n] for marker in markers for n in (1, len(marker) // 2, len(marker) - 1)]
    parts += [marker[n:] for marker in markers for n in (1, len(marker) // 2)]
    piece = st.one_of(
        st.sampled_from(HARD_TEXTS),
        st.sampled_from([*markers, *parts]),
        st.text(st.characters(codec="utf-8"), max_size=6),
    )
    return st.lists(piece, max_size=12).map("".join)


def tools() -> st.SearchStrategy[list[dict[str, Any]] | None]:
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look “it” up <|im_end|>",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    return st.sampled_from([None, None, [tool], [tool, {"function": {"name": "f"}}]])


def conversations(
    markers: Sequence[str], *, turns_max: int = 4
) -> st.SearchStrategy[list[Message]]:
    """Return conversations that end with a question or a tool's result."""
    text = texts(markers)
    user = text.map(lambda t: [{"role": "user", "content": t}])
    thought = st.tuples(text, text).map(lambda t: f"<think>\n{t[0]}\n</think>\n\n{t[1]}")
    answer = st.one_of(text, thought).map(lambda t: [{"role": "assistant", "content": t}])
    call = st.tuples(text, text).map(lambda t: _call(*t))
    turn = st.tuples(user, st.one_of(answer, call)).map(lambda parts: parts[0] + parts[1])
    nothing: st.SearchStrategy[list[Message]] = st.just([])
    system = st.one_of(nothing, text.map(lambda t: [{"role": "system", "content": t}]))
    turns = st.lists(turn, max_size=turns_max).map(lambda many: [m for one in many for m in one])
    ends = st.one_of(user, st.tuples(user, call).map(lambda parts: parts[0] + parts[1]))
    return st.tuples(system, turns, ends).map(lambda parts: parts[0] + parts[1] + parts[2])


def _call(argument: str, result: str) -> list[Message]:
    function = {"name": "look_up", "arguments": json.dumps({"q": argument})}
    call = {"id": "c1", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
