"""Requests as the prompts that vLLM makes of them: each expected text is written out."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import moongate.simulator
from moongate.engine_plugins.chat_template import ChatTemplate
from moongate.engine_plugins.vllm_render import (
    ModelDirectoryError,
    ModelRenderer,
    PromptRefused,
    PromptUnsupported,
    is_text_part,
)

from .templates import CHATML, DEVELOPER, LLAMA, MACRO, PARTS, QWEN

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
VOCABULARY = {"<s>": 0, "a": 1, "b": 2, "[UNK]": 3}


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of words, which sets <s> before a text if it is asked for."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def renderer(source: str, **more_templates: str) -> ModelRenderer:
    sources = {"default": source, **more_templates}
    templates = {name: ChatTemplate(text) for name, text in sources.items()}
    return ModelRenderer(make_tokenizer(), templates, {"bos_token": "<s>"})


def text_of(source: str, *messages: object, **fields: object) -> str:
    return renderer(source).chat_text({"messages": list(messages), **fields})


def user(content: object, **fields: object) -> dict[str, object]:
    return {"role": "user", "content": content, **fields}


def text_part(text: str, **fields: object) -> dict[str, object]:
    return {"type": "text", "text": text, **fields}


def function_tool(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


def call(arguments: object, **fields: object) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **fields}


def refusal_of(source: str, *messages: object, **fields: object) -> str:
    """Return why the prompt is not rendered here: the fixed word, or `refused`."""
    with pytest.raises((PromptRefused, PromptUnsupported)) as raised:
        text_of(source, *messages, **fields)
    error = raised.value
    return error.reason if isinstance(error, PromptUnsupported) else "refused"


# --- content --------------------------------------------------------------------------------------


def test_text_stays_as_it_is_for_a_template_of_texts() -> None:
    assert text_of(PLAIN, user(" <é>\n")) == "<user> <é>\n"


def test_parts_become_lines_for_a_template_of_texts() -> None:
    parts = [text_part("a"), "b", {"type": "input_text", "text": "c"}]
    assert text_of(PLAIN, user(parts)) == "<user>a\nb\nc"


def test_empty_parts_give_no_line() -> None:
    assert text_of(PLAIN, user([text_part("a"), text_part(""), text_part("b")])) == "<user>a\nb"


@pytest.mark.parametrize("content", [None, "", [], [text_part("")], [{"type": "text"}]])
def test_no_content_is_an_empty_text(content: object) -> None:
    assert text_of(PLAIN, user(content)) == "<user>"


def test_text_becomes_a_part_for_a_template_of_parts() -> None:
    assert text_of(PARTS, user("a"), add_generation_prompt=False) == (
        '[user]({"type": "text", "text": "a"})'
    )


def test_every_kind_of_text_becomes_a_text_part() -> None:
    parts = [
        {"type": "output_text", "text": "o"},
        {"type": "refusal", "refusal": "r"},
        {"type": "thinking", "thinking": "t", "closed": True},
    ]
    assert text_of(PARTS, user(parts), add_generation_prompt=False) == (
        '[user]({"type": "text", "text": "o"})({"type": "text", "text": "r"})'
        '({"type": "text", "text": "t"})'
    )


def test_a_parts_unknown_fields_stay_on_it() -> None:
    part = {"cache_control": {"type": "ephemeral"}, "annotations": [], **text_part("a")}
    assert text_of(PARTS, user([part]), add_generation_prompt=False) == (
        '[user]({"type": "text", "text": "a", '
        '"cache_control": {"type": "ephemeral"}, "annotations": []})'
    )


def test_a_tools_result_is_one_text_even_for_a_template_of_parts() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [text_part("a"), text_part("b")]}
    assert text_of(PARTS, result, add_generation_prompt=False) == "[tool]a\nb"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "tool_reference", "name": "f"},
        {"image_url": "x"},
        text_part("a", uuid="u"),
        {"type": ["text"], "text": "a"},
        {"type": None, "text": "a"},
    ],
)
def test_parts_beyond_text_are_left_to_the_engine(part: object) -> None:
    assert refusal_of(PLAIN, user([part])) == "multimodal"


@pytest.mark.parametrize(
    ("part", "is_text"),
    [
        ("a", True),
        (text_part("a"), True),
        ({"type": "refusal", "refusal": "r"}, True),
        (text_part("a", uuid="u"), False),
        ({"type": "image_url"}, False),
        ({"type": {}}, False),
        (7, False),
    ],
)
def test_what_is_text_is_known_before_rendering(part: object, is_text: bool) -> None:
    assert is_text_part(part) is is_text


@pytest.mark.parametrize("content", [7, {"type": "text"}, [7], [{"type": "text", "text": 7}]])
def test_content_of_another_form_is_refused(content: object) -> None:
    assert refusal_of(PLAIN, user(content)) == "refused"


@pytest.mark.parametrize("messages", [None, [], "x", [7], [{"content": "a"}], [{"role": 1}]])
def test_messages_of_another_form_are_refused(messages: object) -> None:
    with pytest.raises(PromptRefused, match="messages"):
        renderer(PLAIN).chat_text({"messages": messages})


# --- the billing header ---------------------------------------------------------------------------

HEADER = "x-anthropic-billing-header: cc_version=2; cch=1f"


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{HEADER}\nYou are.", "You are."),
        (HEADER, ""),
        ([text_part(HEADER), text_part("You are.")], "You are."),
        ([HEADER, f"{HEADER}\nYou are."], "You are."),
        (f"You are.\n{HEADER}", f"You are.\n{HEADER}"),
        ([{"type": "input_text", "text": HEADER}], HEADER),
    ],
)
def test_the_billing_header_leaves_a_system_message(content: object, left: str) -> None:
    assert text_of(PLAIN, {"role": "system", "content": content}) == f"<system>{left}"


def test_the_billing_header_stays_in_other_messages() -> None:
    assert text_of(PLAIN, user(HEADER)) == f"<user>{HEADER}"


# --- fields of messages ---------------------------------------------------------------------------


def test_unknown_fields_of_a_message_do_not_reach_the_template() -> None:
    message = user("a", name="n", task="t", tool_call_id="x", new_2027=1)
    assert text_of(AS_JSON, message) == (
        '{"role": "user", "content": "a", "name": "n", "task": "t"}'
    )


def test_a_tools_message_keeps_its_call() -> None:
    message = {"role": "tool", "content": "a", "tool_call_id": "c1"}
    assert text_of(AS_JSON, message) == ('{"role": "tool", "content": "a", "tool_call_id": "c1"}')


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "c"}, "c"),
        ({"reasoning": "r", "reasoning_content": "c"}, "r"),
        ({"reasoning": None, "reasoning_content": "c"}, "c"),
        ({"reasoning": ""}, ""),
    ],
)
def test_reasoning_goes_by_both_names(fields: dict[str, object], reasoning: str) -> None:
    message = {"role": "assistant", "content": "a", **fields}
    assert json.loads(text_of(AS_JSON, message)) == {
        "role": "assistant", "content": "a", "reasoning": reasoning, "reasoning_content": reasoning,
    }  # fmt: skip


def test_reasoning_of_others_than_the_assistant_is_dropped() -> None:
    assert text_of(AS_JSON, user("a", reasoning="r")) == '{"role": "user", "content": "a"}'


# --- tool calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"b": {"z": 1, "a": 2.0}}', '{"b": {"z": 1, "a": 2.0}}'),
        ('{"y": "<é>"}', '{"y": "<é>"}'),
        ({"x": 1}, '{"x": 1}'),
        ("", "{}"),
        (None, "{}"),
        ("[]", "{}"),
        ("42", "{}"),
        ("{broken", "{}"),
    ],
)
def test_a_calls_arguments_become_an_object(arguments: object, parsed: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    assert text_of(CHATML, message, add_generation_prompt=False) == (
        f'<|im_start|>assistant\n<call>{{"arguments": {parsed}, "name": "f"}}</call><|im_end|>\n'
    )


def test_a_calls_fields_come_in_the_engines_order() -> None:
    given = {"index": 0, "type": "function", "function": {"x": 1, "name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{**given, "id": "c1"}]}
    assert text_of(PARTS, message, add_generation_prompt=False) == (
        '[assistant]({"type": "text", "text": ""}){"id": "c1", "function": '
        '{"arguments": {}, "name": "f", "x": 1}, "type": "function", "index": 0}'
    )


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_as_if_not_named(calls: object) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert text_of(AS_JSON, message) == '{"role": "assistant", "content": "a"}'


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        ["x"],
        [{"id": "c1"}],
        [{"type": "custom", "function": {"name": "f"}}],
        [call("9" * 5000)],
        [call("[" * 100_000)],
    ],
)
def test_calls_of_another_form_are_refused(calls: object) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert refusal_of(PLAIN, message) == "refused"


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "function"),
    [
        (function_tool(), '{"name": "f", "description": null, "parameters": null}'),
        (
            function_tool(strict=True, parameters={"b": 1, "a": 2}, description="d", new_2027=1),
            '{"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}, "strict": true}',
        ),
        (
            function_tool(strict=None, defer_loading=True),
            '{"name": "f", "description": null, "parameters": null, "defer_loading": true}',
        ),
        (
            {"cache_control": {}, "function": {"description": "d", "name": "f"}},
            '{"name": "f", "description": "d", "parameters": null}',
        ),
    ],
)
def test_c39_a_tool_has_the_engines_fields_in_its_order(
    tool: dict[str, object], function: str
) -> None:
    text = text_of(CHATML, user("a"), tools=[tool], add_generation_prompt=False)
    assert text == (
        f'<|im_start|>tools\n{{"type": "function", "function": {function}}}\n<|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n"
    )


def test_a_deferred_tool_is_deferred_in_both_places() -> None:
    tool = {**function_tool(), "defer_loading": True}
    text = text_of("{{ tools[0] | tojson }}", user("a"), tools=[tool])
    assert text == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
        '"defer_loading": true}, "defer_loading": true}'
    )


def test_without_tools_a_template_sees_none() -> None:
    assert text_of("{{ tools is none }}", user("a")) == "True"


def test_tools_choose_the_template_made_for_them() -> None:
    both = renderer("plain", tool_use="with tools")
    body = {"messages": [user("a")]}
    assert both.chat_text(body) == "plain"
    assert both.chat_text({**body, "tools": [function_tool()]}) == "with tools"


@pytest.mark.parametrize("tools", [[], "x", [7], [{}], [{"function": {}}], [{"function": "f"}]])
def test_tools_of_another_form_are_refused(tools: object) -> None:
    assert refusal_of(PLAIN, user("a"), tools=tools) == "refused"


# --- the developer's role -------------------------------------------------------------------------


def test_a_template_that_knows_developers_gets_them() -> None:
    assert text_of(DEVELOPER, {"role": "developer", "content": "d"}, user("a")) == "<dev>d<user:>a"


def test_for_other_templates_a_developer_is_the_system() -> None:
    assert text_of(PLAIN, {"role": "developer", "content": "d"}, user("a")) == "<system>d<user>a"


def test_then_all_system_messages_become_one_at_the_start() -> None:
    messages = [
        {"role": "system", "content": "s"},
        user("a"),
        {"role": "developer", "content": "d"},
        {"role": "system", "content": ""},
    ]
    assert text_of(PLAIN, *messages) == "<system>s\n\nd<user>a"


def test_without_a_developer_system_messages_stay_where_they_are() -> None:
    messages = [{"role": "system", "content": "s"}, user("a"), {"role": "system", "content": "t"}]
    assert text_of(PLAIN, *messages) == "<system>s<user>a<system>t"


def test_a_template_of_parts_gets_the_merged_message_as_text() -> None:
    messages = [
        {"role": "system", "content": [text_part("s"), text_part("t")]},
        {"role": "developer", "content": "d"},
    ]
    assert text_of(MACRO, *messages) == "[system]s\nt\n\nd"


def test_a_developers_own_tools_are_left_to_the_engine() -> None:
    message = {"role": "developer", "content": "d", "tools": [function_tool()]}
    assert refusal_of(DEVELOPER, message) == "developer_tools"


# --- variables ------------------------------------------------------------------------------------

SHOWN = "{{ add_generation_prompt }} {{ enable_thinking }} {{ reasoning_effort }} {{ x }}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "True   "),
        ({"add_generation_prompt": False}, "False   "),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "True   "),
        ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, "True False  1"),
        ({"reasoning_effort": "low"}, "True True low "),
        ({"reasoning_effort": "none"}, "True False none "),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "True False low ",
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "True  low "),
        ({"chat_template_kwargs": None}, "True   "),
    ],
)
def test_c39_what_a_template_is_told(fields: dict[str, object], shown: str) -> None:
    assert text_of(SHOWN, user("a"), **fields) == shown


def test_special_tokens_are_known_by_name() -> None:
    assert text_of("{{ bos_token }}", user("a")) == "<s>"


def test_documents_are_none_unless_given() -> None:
    source = "{{ documents }}"
    assert text_of(source, user("a")) == "None"
    assert text_of(source, user("a"), documents=[{"text": "d"}]) == "[{'text': 'd'}]"


@pytest.mark.parametrize("name", ["chat_template", "tools", "messages", "tokenize", "return_dict"])
def test_keywords_that_would_replace_the_engines_own_are_left_to_it(name: str) -> None:
    assert refusal_of(PLAIN, user("a"), chat_template_kwargs={name: "x"}) == "template_kwargs"


def test_a_template_in_the_request_is_left_to_the_engine() -> None:
    assert refusal_of(PLAIN, user("a"), chat_template=PLAIN) == "request_template"


def test_keywords_of_another_form_are_refused() -> None:
    assert refusal_of(PLAIN, user("a"), chat_template_kwargs=["x"]) == "refused"


def test_without_a_template_chat_is_left_to_the_engine() -> None:
    bare = ModelRenderer(make_tokenizer(), {}, {})
    with pytest.raises(PromptUnsupported) as raised:
        bare.chat_text({"messages": [user("a")]})
    assert raised.value.reason == "no_template"


def test_what_the_template_refuses_is_refused() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("{}"), call("{}")]}
    assert refusal_of(LLAMA, user("a"), message) == "refused"


# --- whole conversations --------------------------------------------------------------------------

TURNS = (
    {"role": "system", "content": "Be brief."},
    user("1+1?"),
    {"role": "assistant", "content": "<think>\nold\n</think>\n\n2"},
    user([text_part("and "), text_part("2+2?")]),
    {"role": "assistant", "content": "", "reasoning_content": "new",
     "tool_calls": [call('{"n": 4, "s": "x"}')]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
)  # fmt: skip


def test_a_thinking_model_keeps_its_thoughts_since_the_last_question() -> None:
    assert text_of(QWEN, *TURNS, chat_template_kwargs={"enable_thinking": False}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nand 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nnew\n</think>\n\n"
        "\n<tool_call>\n<function=f>\n<n>4\n<s>x<|im_end|>\n"
        "<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_trimming_template_moves_the_system_message_to_its_header() -> None:
    turns = ({"role": "system", "content": " s \n"}, user(" hi "), *TURNS[4:])
    assert text_of(LLAMA, *turns, chat_template_kwargs={"date_string": "1 May"}) == (
        "<s><|start|>system<|end|>\nToday: 1 May\ns<|eot|>"
        "<|start|>user<|end|>\nhi<|eot|>"
        '<|start|>assistant<|end|>{"name": "f", "parameters": {"n": 4, "s": "x"}}<|eot|>'
        '<|start|>ipython<|end|>"4"<|eot|>'
        "<|start|>assistant<|end|>\n"
    )


# --- a final message to be continued --------------------------------------------------------------


def continued(source: str, content: object) -> str:
    final = {"role": "assistant", "content": content}
    return text_of(
        source, user("a"), final, continue_final_message=True, add_generation_prompt=False
    )


def test_c39_a_continued_message_ends_the_prompt() -> None:
    assert continued(CHATML, "The answer") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe answer"
    )


def test_spaces_at_the_end_of_a_continued_message_stay() -> None:
    assert continued(PLAIN, "The answer \n") == "<user>a<assistant>The answer \n"


def test_a_trimming_template_takes_the_spaces_of_a_continued_message() -> None:
    assert continued(TRIMMING, "The answer \n") == "<user>a<assistant>The answer"


def test_the_last_part_is_continued() -> None:
    assert continued(MACRO, [text_part("x"), text_part("y ")]) == "[user](a)[assistant](x)(y "


def test_a_message_that_the_template_leaves_out_can_not_be_continued() -> None:
    with pytest.raises(PromptRefused, match="leaves out"):
        continued("{{ messages[0].content }}", "x")


def test_a_message_of_no_parts_can_not_be_continued() -> None:
    with pytest.raises(PromptRefused, match="no text"):
        continued(MACRO, [])


def test_a_continued_message_excludes_a_generation_prompt() -> None:
    assert refusal_of(PLAIN, user("a"), continue_final_message=True) == "refused"


# --- token ids ------------------------------------------------------------------------------------


def test_a_chat_has_no_special_tokens_beside_its_templates() -> None:
    body = {"messages": [user("a b")]}
    spaced = renderer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert spaced.chat_token_ids(body) == [1, 2]
    assert spaced.chat_token_ids({**body, "add_special_tokens": True}) == [0, 1, 2]


def test_a_completion_has_special_tokens_unless_told_otherwise() -> None:
    plain = renderer(PLAIN)
    assert plain.completion_token_ids("a b") == [0, 1, 2]
    assert plain.completion_token_ids("a b", add_special_tokens=False) == [1, 2]
    assert plain.completion_token_ids([2, 1]) == [2, 1]


def test_truncation_is_left_to_the_engine() -> None:
    with pytest.raises(PromptUnsupported) as raised:
        renderer(PLAIN).chat_token_ids({"messages": [user("a")], "truncate_prompt_tokens": 4})
    assert raised.value.reason == "truncation"


def test_c19_a_lone_surrogate_is_left_to_the_engine() -> None:
    with pytest.raises(PromptUnsupported) as raised:
        renderer(PLAIN).completion_token_ids("a \ud83d b")
    assert raised.value.reason == "lone_surrogate"


@pytest.mark.parametrize(
    ("templates", "frame"),
    [
        ([], ([], [])),
        (["$A"], ([], [])),
        (["<s> $A"], ([0], [])),
        (["$A b <s>"], ([], [2, 0])),
        (["a a $A a"], ([1, 1], [1])),
        # The text is between <s> and <s> once more.
        (["<s> $A", "$A $A"], None),
    ],
)
def test_special_tokens_around_a_text_are_known_unless_they_depend_on_it(
    templates: list[str], frame: tuple[list[int], list[int]] | None
) -> None:
    tokenizer = make_tokenizer()
    special = [(name, VOCABULARY[name]) for name in ("<s>", "a", "b")]
    tokenizer.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single=one, special_tokens=special) for one in templates]
    )
    assert ModelRenderer(tokenizer, {}, {}).frame == frame


def test_a_text_is_encoded_with_the_places_where_its_tokens_end() -> None:
    assert renderer(PLAIN).encode_with_ends("a b") == ([1, 2], [2, 3])
    assert renderer(PLAIN).encode_with_ends("") == ([], [])


def test_a_character_of_several_tokens_is_complete_with_the_last() -> None:
    own = ModelRenderer.load(Path(moongate.simulator.__file__).parent / "model")
    ids, ends = own.encode_with_ends("a☃b")
    assert len(ids) == len(ends) > 3
    assert (ends[0], ends[-3:]) == (1, [1, 2, 3])


def test_the_end_of_a_turn_is_the_tokenizers_own_token() -> None:
    own = ModelRenderer.load(Path(moongate.simulator.__file__).parent / "model")
    assert own.end_token is not None
    assert own.end_token.text == "<|im_end|>"
    assert own.encode("<|im_end|>", add_special_tokens=False) == [own.end_token.id]
    assert renderer(PLAIN).end_token is None


def test_pieces_are_encoded_each_by_itself_without_special_tokens() -> None:
    assert renderer(PLAIN).encode_pieces(["a b", "", "b"]) == [[1, 2], [], [2]]


@pytest.mark.parametrize(("source", "tells"), [(PLAIN, False), ("{{ strftime_now('%d') }}", True)])
def test_a_template_with_a_clock_is_known(source: str, tells: bool) -> None:
    assert renderer(PLAIN, tool_use=source).tells_time is tells


def test_ids_become_text_again() -> None:
    assert renderer(PLAIN).decode([0, 1, 2]) == "<s> a b"
    assert renderer(PLAIN).vocabulary_size == len(VOCABULARY)


# --- model directories ----------------------------------------------------------------------------


def make_directory(path: Path, files: dict[str, Any]) -> Path:
    make_tokenizer().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def loaded_text(path: Path, files: dict[str, Any], **fields: object) -> str:
    model = ModelRenderer.load(make_directory(path, files))
    return model.chat_text({"messages": [user("a")], **fields})


def test_a_template_in_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}|{{ unk_token }}",
              "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}  # fmt: skip
    assert loaded_text(tmp_path, {"tokenizer_config.json": config}) == "<s></s>|"


def test_special_tokens_of_their_own_file(tmp_path: Path) -> None:
    files = {
        "special_tokens_map.json": {"bos_token": "old", "eos_token": "</s>"},
        "tokenizer_config.json": {"bos_token": "<s>"},
        "chat_template.jinja": "{{ bos_token }}{{ eos_token }}",
    }
    assert loaded_text(tmp_path, files) == "<s></s>"


def test_a_list_of_templates_by_name(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = {"tokenizer_config.json": {"chat_template": templates}}
    assert loaded_text(tmp_path, files) == "d"
    assert loaded_text(tmp_path, files, tools=[function_tool()]) == "t"


def test_template_files_replace_those_in_the_configuration(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = {
        "tokenizer_config.json": {"chat_template": templates},
        "chat_template.jinja": "from the file",
    }
    assert loaded_text(tmp_path, files) == "from the file"
    assert loaded_text(tmp_path, files, tools=[function_tool()]) == "from the file"


def test_additional_template_files_have_their_name(tmp_path: Path) -> None:
    files = {"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}
    assert loaded_text(tmp_path, files, tools=[function_tool()]) == "t"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer.json": "{"}, "can't be read"),
        ({"tokenizer_config.json": "{"}, "is not JSON"),
        ({"tokenizer_config.json": []}, "expected a JSON object"),
        ({"chat_template.jinja": "a\n{% for %}"}, "chat template, line 2"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x"}]}}, "chat_template"),
    ],
)
def test_c106_a_directory_that_is_no_model_says_what_is_wrong(
    tmp_path: Path, files: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=text):
        ModelRenderer.load(make_directory(tmp_path, files))


def test_c106_an_alias_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"has no tokenizer\.json"):
        ModelRenderer.load(tmp_path / "served-name")


def test_a_tokenizer_that_can_not_encode_is_no_model(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelDirectoryError, match=r"can't be used: .*\[UNK\]"):
        ModelRenderer.load(tmp_path)


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "tokenizer.model.v3"])
def test_mistrals_own_formats_are_left_to_the_engine(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelDirectoryError, match=r"has no tokenizer\.json"):
        ModelRenderer.load(tmp_path)


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ModelRenderer.load(tmp_path).completion_token_ids("a b") == [0, 1, 2]


# --- numbers that a parser rounds -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "is_read"),
    [
        ("9223372036854775807", True),
        ("1.5e3", True),
        ("1e-30", True),
        ("18446744073709551616", False),
        ("-12345678901234567890123", False),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"max": [%s]}}}]',
        '"chat_template_kwargs": {"x": {"y": %s}}',
        '"documents": [{"n": %s}]',
        (
            '"messages": [{"role": "assistant", "content": "", "tool_calls":'
            ' [{"function": {"name": "f", "arguments": {"x": %s}}}]}]'
        ),
    ],
)
def test_a_number_that_the_gateways_parser_rounds_is_left_to_the_engine(
    number: str, is_read: bool, place: str
) -> None:
    renderer = ModelRenderer.load(Path(moongate.simulator.__file__).parent / "model")
    base = {"messages": [{"role": "user", "content": "1e30 18446744073709551616"}]}
    fields = {**base, **orjson.loads("{" + place.replace("%s", number) + "}")}
    if is_read:
        assert renderer.chat_text(fields)
    else:
        with pytest.raises(PromptUnsupported, match="huge_number"):
            renderer.chat_text(fields)


# --- manners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "effort"),
    [
        ("{{ messages[0].content }}", "low"),  # `none` is like any other
        ("{{ 'think' if enable_thinking else 'answer' }}", "none"),
        ("{{ reasoning_effort }}", "none"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}", "low"),
    ],
)
def test_no_thinking_is_asked_for_in_the_way_the_template_knows(source: str, effort: str) -> None:
    assert renderer(source).manners.disabled_thinking_effort == effort


@pytest.mark.parametrize(("source", "merges"), [(CHATML, False), (QWEN, True)])
def test_system_messages_are_merged_where_they_may_only_come_first(
    source: str, merges: bool
) -> None:
    assert renderer(source).manners.merges_system is merges
