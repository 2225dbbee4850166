"""How templates are compiled and run, and how they want a message's content."""

import re
from datetime import datetime

import jinja2
import pytest

from moongate.engine_plugins.chat_template import ChatTemplate, TemplateRefused

from .templates import ALIAS, CHATML, DEVELOPER, LLAMA, MACRO, PARTS, QWEN, STYLES

HI = {"role": "user", "content": "hi"}


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(variables)


def in_loop(loop: str) -> str:
    """Return a template with this loop inside a loop over the messages."""
    return "{% for m in messages %}" + loop + "{% endfor %}"


# --- content format -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, LLAMA, DEVELOPER], ids=["chatml", "llama", "developer"])
def test_templates_that_use_content_as_a_whole_want_text(source: str) -> None:
    assert ChatTemplate(source).content_format == "string"


@pytest.mark.parametrize("source", [PARTS, MACRO, ALIAS], ids=["parts", "macro", "alias"])
def test_templates_that_loop_over_content_want_parts(source: str) -> None:
    assert ChatTemplate(source).content_format == "openai"


def test_a_macro_fed_by_position_with_content_wants_parts() -> None:
    assert ChatTemplate(QWEN).content_format == "openai"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.content %}{% endfor %}",
        "{% for p in m['content'] %}{% endfor %}",
        "{% for p in m.content | list %}{% endfor %}",
        "{% for p in m.content[1:] %}{% endfor %}",
        "{% if m.content is string %}{% else %}{% for p in m.content %}{% endfor %}{% endif %}",
        "{% set content = m.content %}{% for p in content %}{% endfor %}",
    ],
)
def test_ways_to_loop_over_content(loop: str) -> None:
    assert ChatTemplate(in_loop(loop)).content_format == "openai"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.tool_calls %}{% endfor %}",
        "{% for p in other.content %}{% endfor %}",
        "{% set c = m.content %}{% for p in c %}{% endfor %}",
        "{% for p in m[key] %}{% endfor %}",
        "{{ m.content }}",
    ],
)
def test_other_loops_say_nothing_of_content(loop: str) -> None:
    assert ChatTemplate(in_loop(loop)).content_format == "string"


@pytest.mark.parametrize(
    "loop",
    [
        "{% set parts = m.content %}{% for p in parts %}{% endfor %}",
        "{% for a, b in m.content %}{% endfor %}",
        "{% for a, b in m.content %}{% endfor %}{% for p in m.content %}{% endfor %}",
    ],
)
def test_what_the_engine_can_not_follow_counts_as_text(loop: str) -> None:
    assert ChatTemplate(in_loop(loop)).content_format == "string"


def test_messages_kept_in_a_namespace_count_as_text() -> None:
    source = "{% set ns = namespace() %}{% set ns.kept = messages %}" + PARTS
    assert ChatTemplate(source).content_format == "string"


def test_a_macro_that_nobody_feeds_with_content_wants_text() -> None:
    macro = "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
    assert ChatTemplate(macro + in_loop("{{ show(m.name) }}")).content_format == "string"


def test_a_macro_inside_of_a_macro_sees_what_that_is_fed_with() -> None:
    inner = "{% macro inner() %}{% for p in body %}{% endfor %}{% endmacro %}{{ inner() }}"
    outer = "{% macro outer(body) %}" + inner + "{% endmacro %}"
    assert ChatTemplate(outer + in_loop("{{ outer(m.content) }}")).content_format == "openai"


@pytest.mark.parametrize("alias", ["messages", "messages[1:]", "messages | list", "loop_messages"])
def test_aliases_of_the_messages_are_followed(alias: str) -> None:
    source = (
        "{% set loop_messages = messages %}{% set these = " + alias + " %}"
        "{% for m in these %}{% for p in m.content %}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).content_format == "openai"


@pytest.mark.parametrize(
    ("source", "knows"), [(DEVELOPER, True), ("{{ 'developer' }}", True), (QWEN, False)]
)
def test_a_template_that_names_the_developer_knows_that_role(source: str, knows: bool) -> None:
    assert ChatTemplate(source).knows_developer is knows


# --- the environment ------------------------------------------------------------------------------


def test_json_is_written_without_html_escapes() -> None:
    value = {"b": "<é> & 'x'", "a": [1.0, None]}
    assert rendered("{{ v | tojson }}", v=value) == """{"b": "<é> & 'x'", "a": [1.0, null]}"""


def test_json_can_be_indented_sorted_and_packed() -> None:
    source = "{{ v | tojson(separators=(',', ':'), sort_keys=true) }}|{{ v | tojson(indent=1) }}"
    assert rendered(source, v={"b": 1, "a": 2}) == '{"a":2,"b":1}|{\n "b": 1,\n "a": 2\n}'


def test_json_can_be_kept_to_ascii() -> None:
    assert rendered("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_the_date_is_written_in_the_templates_form() -> None:
    before, text, after = datetime.now(), rendered("{{ strftime_now('%Y-%m-%d') }}"), datetime.now()  # noqa: DTZ005 - as the engine
    assert text in {f"{before:%Y-%m-%d}", f"{after:%Y-%m-%d}"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)


def test_a_line_with_nothing_but_a_tag_leaves_no_trace() -> None:
    assert rendered("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_loops_can_be_left_and_cut_short() -> None:
    source = (
        "{% for n in [1, 2, 3, 4] %}{% if n == 2 %}{% continue %}{% endif %}"
        "{% if n == 4 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    )
    assert rendered(source) == "13"


def test_a_generation_block_shows_its_text() -> None:
    assert rendered("a{% generation %}{{ x }}{% endgeneration %}c", x="b") == "abc"


def test_what_a_generation_block_sets_ends_with_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert rendered(source) == "21"


def test_the_loop_variable_is_known_in_a_generation_block() -> None:
    source = in_loop("{% generation %}{{ m.content }}{% endgeneration %}")
    assert rendered(source, messages=[HI]) == "hi"


@pytest.mark.parametrize("style", STYLES)
def test_a_compiled_template_can_be_used_again(style: str) -> None:
    template = ChatTemplate(STYLES[style])
    first, second = (template.render({"messages": [HI], "bos_token": "<s>"}) for _ in range(2))
    assert first == second
    assert "hi" in first


# --- manners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "wants"),
    [
        (CHATML, False),
        (QWEN, True),
        ("{% if messages[2].role == 'system' %}{{ raise_exception('no') }}{% endif %}", True),
        ("{{ strftime_now('%Y') }}", True),  # not that it minds: it fails where the engine tries it
        ("{% generation %}{% endgeneration %}", True),
        ("{{ bos_token }}", False),
        ("{{ messages + 1 }}", False),
    ],
)
def test_the_engine_tries_whether_system_messages_may_come_later(source: str, wants: bool) -> None:
    assert ChatTemplate(source).wants_system_first is wants


# --- refusals -------------------------------------------------------------------------------------


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for n in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{% include 'file' %}",
    ],
)
def test_whatever_a_template_comes_to_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefused):
        rendered(source, messages=[HI])


def test_a_template_that_is_no_jinja_can_not_be_compiled() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}")
