"""From a request's body to its token ids, as vLLM renders and tokenises it.

`ModelRenderer` stands for one model directory: its `tokenizer.json` and chat template. What it
can't render as the engine would (images, a template of the request's own, truncation) it refuses
with `PromptUnsupported`, so that nobody takes a guess for the prompt; what the engine would refuse
too is a `PromptRefused`. Everything is checked against a real engine's `/tokenize` in the e2e tests,
and by the gateway's parity probe before an instance's prompts are rendered here.

Source: vLLM 0.32 `renderers/chat_utils.py`, `renderers/hf.py`, `renderers/online_renderer.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import orjson
from tokenizers import Encoding, Tokenizer

from moongate.engine_plugins.boundaries import Boundaries, find_boundaries
from moongate.engine_plugins.chat_template import ChatTemplate, TemplateRefused

# The library would else start a thread for each core on its own for every batch; how many texts are
# encoded side by side is the caller's decision.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Message = dict[str, Any]

TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
BILLING_HEADER = "x-anthropic-billing-header"
"""First line of Claude Code's system prompt; changes with every request, so engines drop it."""

THINKING_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Those that a Messages request can ask for."""

_RESERVED_KWARGS = frozenset({"chat_template", "tokenize", "tools", "messages", "return_dict"})
_EXPONENT = re.compile(rb"\de\+?\d\d")
_EXACT_MAX = 2.0**63

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class RenderError(ValueError):
    """The prompt could not be rendered; see the two kinds."""


class PromptUnsupported(RenderError):
    """Only the engine can render this. `reason` is a fixed word, for metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"can't be rendered here: {reason}")
        self.reason = reason


class PromptRefused(RenderError):
    """The engine would refuse it as well."""


class ModelDirectoryError(ValueError):
    """A model directory lacks what rendering needs; the text says what and where."""


class TemplateManners(NamedTuple):
    """What the engine finds out of a model's templates, to make chats of Messages requests."""

    merges_system: bool  # all system messages into one, at the start
    disabled_thinking_effort: str  # asked of the template where a request wants no thinking


class EndToken(NamedTuple):
    """What a model says when its turn is over."""

    text: str
    id: int


class ModelRenderer:
    """Renders and tokenises for one model. Thread-safe.

    `boundaries`: where a text can be cut so that its pieces encode alone. `frame`: the ids that come
    before and after a text that gets special tokens, None where they depend on the text.
    `tells_time`: some template renders the date, so two renderings may differ. `manners`: of the templates.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = special_tokens
        sources = [template.source for template in templates.values()]
        self.boundaries: Boundaries = find_boundaries(
            tokenizer, [*sources, *special_tokens.values()]
        )
        self.frame = _find_frame(tokenizer)
        self.tells_time = any("strftime_now" in source for source in sources)
        self.manners = self._find_manners()

    def _find_manners(self) -> TemplateManners:
        templates = self._templates.values()
        return TemplateManners(
            merges_system=not templates or any(t.wants_system_first for t in templates),
            disabled_thinking_effort="none" if self._takes_effort_none() else "low",
        )

    def _takes_effort_none(self) -> bool:
        """Tell whether the template renders an effort of `none` otherwise than any effort to think.

        Source: vLLM 0.32 `entrypoints/anthropic/serving.py` `_probe_disabled_thinking_effort`.
        """

        def render(effort: str) -> str | None:
            body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
            try:
                return self.chat_text(body)
            except RenderError:
                return None

        none = render("none")
        return none is not None and none not in map(render, THINKING_EFFORTS)

    @classmethod
    def load(cls, directory: Path) -> ModelRenderer:
        """Load `tokenizer.json`, `tokenizer_config.json` and the chat template, if there is one.

        Raises: ModelDirectoryError.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelDirectoryError(f"{directory} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelDirectoryError(f"{path} can't be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
        templates = _load_templates(directory, config)
        try:
            return cls(tokenizer, templates, special)
        except Exception as error:  # again nothing narrower: it can't encode what it is tried on
            raise ModelDirectoryError(f"{path} can't be used: {error}") from error

    # --- rendering --------------------------------------------------------------------------------

    def chat_text(self, body: Mapping[str, Any]) -> str:
        """Return a chat request's prompt as text.

        Raises: RenderError.
        """
        if body.get("chat_template") is not None:
            raise PromptUnsupported("request_template")
        tools = _tools(body.get("tools"))
        template = self._template(tools)
        conversation = _conversation(body.get("messages"), template)
        variables = _template_variables(body)
        if any(map(_has_huge_number, (tools, variables))):
            raise PromptUnsupported("huge_number")
        continues = bool(variables.pop("continue_final_message", False))
        if continues:
            conversation = _mark_final_message(conversation)
        try:
            text = template.render(
                {
                    **self._special_tokens,
                    "documents": None,
                    **variables,
                    "messages": conversation,
                    "tools": tools,
                }
            )
        except TemplateRefused as error:
            raise PromptRefused(str(error)) from error
        return _cut_at_mark(text) if continues else text

    def chat_token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return a chat request's prompt as token ids.

        Raises: RenderError.
        """
        if body.get("truncate_prompt_tokens") is not None:
            raise PromptUnsupported("truncation")
        special = body.get("add_special_tokens") is True
        return self.encode(self.chat_text(body), add_special_tokens=special)

    def completion_token_ids(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a completion prompt as token ids; ids stay as they are."""
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=add_special_tokens)
        return list(prompt)

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, each by itself, without special tokens around them.

        Cost: about 1 ms per KB; releases the interpreter lock.
        """
        # Without the tokens' places in the text, which nobody needs, it takes half the time.
        encodings = self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Cost: about 4 ms per 1,000 tokens; releases the interpreter lock."""
        ids: list[int] = self._encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Raises: PromptUnsupported."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptUnsupported("lone_surrogate") from error

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return a text's ids, without special tokens around them, and where each leaves off.

        Units: characters of `text` that are complete with the token; a character that several tokens
        make up is complete with the last. Raises: PromptUnsupported.
        """
        encoding = self._encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return encoding.ids, [*starts[1:], len(text)] if starts else []

    @property
    def end_token(self) -> EndToken | None:
        """What ends a turn of the model, if its directory says so."""
        text = self._special_tokens.get("eos_token")
        token_id = None if text is None else self._tokenizer.token_to_id(text)
        return None if text is None or token_id is None else EndToken(text, token_id)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def vocabulary_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        names = ("tool_use", "default") if tools is not None else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise PromptUnsupported("no_template")


def _find_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that `add_special_tokens` puts around any text."""
    frames = set()
    for text in ("a", " b\n", "é 12"):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        framed = tokenizer.encode(text, add_special_tokens=True).ids
        # The text's ids may stand in the frame too: tell by the ends of two texts that differ.
        extra = len(framed) - len(bare)
        fits = [n for n in range(extra + 1) if framed[n : n + len(bare)] == bare]
        frames.add(tuple((tuple(framed[:n]), tuple(framed[n + len(bare) :])) for n in fits))
    common = set.intersection(*(set(frame) for frame in frames))
    if len(common) != 1:
        return None
    ((before, after),) = common
    return list(before), list(after)


# --- files ----------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{path}: expected a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens that templates may use."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _load_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Return the templates by name. Files, if there are any, replace those of the configuration.

    Source: transformers 5 `PreTrainedTokenizerBase._from_pretrained`.
    """
    try:
        sources = _template_files(directory) or _configured_templates(config)
        return {name: ChatTemplate(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ModelDirectoryError(
            f"{directory}: chat template, line {error.lineno}: {error}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelDirectoryError(f"{directory}: chat_template can't be read: {error!r}") from error


def _template_files(directory: Path) -> dict[str, str]:
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    default = directory / "chat_template.jinja"
    if default.is_file():
        files["default"] = default
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _configured_templates(config: Mapping[str, Any]) -> dict[str, str]:
    configured = config.get("chat_template")
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {"default": configured} if isinstance(configured, str) else {}


# --- what the template gets -----------------------------------------------------------------------


def _template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables beside messages and tools. Fields of the body count more than kwargs."""
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise PromptRefused("chat_template_kwargs: expected an object")
    if _RESERVED_KWARGS & kwargs.keys():
        raise PromptUnsupported("template_kwargs")
    effort = body.get("reasoning_effort")
    fields = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in kwargs:
        fields["enable_thinking"] = effort != "none"
    if fields["add_generation_prompt"] and fields["continue_final_message"]:
        raise PromptRefused("add_generation_prompt and continue_final_message exclude each other")
    # An unset field leaves the keyword's value standing.
    return {**kwargs, **{k: v for k, v in fields.items() if v is not None and v != "auto"}}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools as the engine passes them on: known fields, in the order of its models."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise PromptRefused("tools: expected a list with at least one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or "name" not in function:
        raise PromptRefused("tools: expected function tools with a name")
    deferred = tool.get("defer_loading")
    rendered = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        rendered["strict"] = function["strict"]
    function_deferred = function.get("defer_loading")
    if function_deferred is None:
        function_deferred = deferred
    if function_deferred is not None:
        rendered["defer_loading"] = function_deferred
    result: dict[str, Any] = {"type": tool.get("type", "function"), "function": rendered}
    if deferred is not None:
        result["defer_loading"] = deferred
    return result


def _conversation(messages: object, template: ChatTemplate) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise PromptRefused("messages: expected a list with at least one message")
    conversation = [_message(message, template) for message in messages]
    if not template.knows_developer and any(m["role"] == "developer" for m in conversation):
        conversation = _with_one_system_message([_developer_as_system(m) for m in conversation])
    return conversation


def _message(message: object, template: ChatTemplate) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptRefused("messages: expected objects with a role")
    role: str = message["role"]
    rendered: Message = {"role": role, "content": _content(message.get("content"), role, template)}
    if role == "assistant":
        _add_assistant_fields(rendered, message)
    elif role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            rendered[name] = message[name]
    if role == "developer":
        rendered["tools"] = message.get("tools")
        if rendered["tools"] is not None and template.knows_developer:
            # Their fields' order depends on which of its models the engine finds to fit best.
            raise PromptUnsupported("developer_tools")
    return rendered


def _content(content: object, role: str, template: ChatTemplate) -> Any:
    """Return a message's content as the template takes it: one text, or parts."""
    # Templates take a tool's result as one text, whatever they do with other content.
    is_text = template.content_format == "string" or role == "tool"
    if is_text and isinstance(content, str) and role != "system":
        return content  # as nearly all are, so without the detour through parts
    parts = _content_parts(content, role)
    if not is_text:
        return parts
    keeps_empty = template.content_format != "string"
    return "\n".join(part["text"] for part in parts if part["text"] or keeps_empty)


def _content_parts(content: object, role: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise PromptRefused("content: expected a text or a list of parts")
    if role == "system":
        content = _without_billing_header(content)
    return [part for part in map(_text_part, content) if part is not None]


_PART_FIELDS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "closed", "uuid", "name", "data", "file"),
        *("prompt_cache_breakpoint", "input_audio", "audio_url", "audio_embeds"),
        *("image_url", "image_pil", "image_embeds", "video_url", "video_embeds"),
    }
)
"""What the engine knows of parts; other fields stay on a part, for templates that take parts."""


def is_text_part(part: object) -> bool:
    """Tell whether a part of a message's content is text that can be rendered here."""
    if not isinstance(part, dict):
        return isinstance(part, str)
    kind = part.get("type")
    return isinstance(kind, str) and kind in TEXT_PART_TYPES and part.get("uuid") is None


def _text_part(part: object) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise PromptRefused("content: expected texts or objects")
    if not is_text_part(part):
        raise PromptUnsupported("multimodal")
    kind = part["type"]
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None:
        return None
    if not isinstance(text, str):
        raise PromptRefused("content: expected the text of a part to be a string")
    extra = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _without_billing_header(parts: Iterable[object]) -> Iterator[object]:
    """Iterate over a system message's parts; only plain text is looked at, as in the engine."""
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if isinstance(part, dict) and is_text else part
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            yield part
            continue
        rest = text.partition("\n")[2]
        if rest:
            yield {**part, "text": rest} if isinstance(part, dict) else rest


def _add_assistant_fields(rendered: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        rendered["tool_calls"] = [_tool_call(call) for call in calls]
    elif calls is not None and not isinstance(calls, list):
        raise PromptRefused("tool_calls: expected a list")
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")  # the name of older clients
    if reasoning is not None:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise PromptRefused("tool_calls: expected function calls")
    if call.get("type", "function") != "function":
        raise PromptRefused("tool_calls: only calls of type function are known")
    parsed = {**function, "arguments": _arguments(function.get("arguments"))}
    # The engine's models put the fields they know in their own order, and templates may print them.
    ordered = _in_order(parsed, ("arguments", "name"))
    return _in_order({**call, "function": ordered}, ("id", "function", "type"))


def _in_order(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    first = {name: fields[name] for name in names if name in fields}
    return {**first, **{key: value for key, value in fields.items() if key not in first}}


def _arguments(arguments: object) -> dict[str, Any]:
    """Return a call's arguments as an object; what is none becomes empty, as in the engine."""
    if isinstance(arguments, dict) and _has_huge_number(arguments):
        raise PromptUnsupported("huge_number")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
        except (ValueError, RecursionError) as error:  # a number or a nesting without end
            raise PromptRefused("tool_calls: arguments that can't be read") from error
    return arguments if isinstance(arguments, dict) else {}


def _has_huge_number(value: object) -> bool:
    """Tell whether a number may be one that the body's parser could only keep as a float.

    orjson reads integers of more than 64 bits so; the engine keeps them, and templates print them.
    """
    try:
        written = orjson.dumps(value, default=str)
    except orjson.JSONEncodeError:  # nested more deeply than it writes: nobody knows
        return True
    if _EXPONENT.search(written) is None:
        return False
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, float) and abs(one) >= _EXACT_MAX:
            return True
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return False


# --- system messages ------------------------------------------------------------------------------


def _developer_as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {k: v for k, v in message.items() if k != "tools"} | {"role": "system"}


def _with_one_system_message(conversation: list[Message]) -> list[Message]:
    """Return the conversation with its system messages as one, at the start.

    Templates without a developer role often want exactly that.
    """
    systems = [m for m in conversation if m["role"] == "system"]
    if len(systems) == 1 and conversation[0] is systems[0]:
        return conversation
    texts = [_as_text(message["content"]) for message in systems]
    merged: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(m for m in conversation if m["role"] != "system")]


def _as_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content)


# --- a final message to be continued --------------------------------------------------------------


def _mark_final_message(conversation: list[Message]) -> list[Message]:
    """Return the conversation with a mark at the end of its last message's text."""
    *rest, final = conversation
    content = final["content"]
    if isinstance(content, str):
        return [*rest, {**final, "content": content + _CONTINUE_TAG}]
    if not content:
        raise PromptRefused("continue_final_message: the final message has no text")
    *parts, last = content
    return [*rest, {**final, "content": [*parts, {**last, "text": last["text"] + _CONTINUE_TAG}]}]


def _cut_at_mark(text: str) -> str:
    """Return the text up to the mark; a template that trims has cut the mark's own space."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise PromptRefused("continue_final_message: the template leaves out the final message")
    is_whole = text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:at] if is_whole else text[:at].rstrip()
