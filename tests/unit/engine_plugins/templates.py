"""Chat templates in the styles that models come with, written for these tests."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson ~ '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' ~ call.function | tojson ~ '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Content as one text; a tool call's function as the JSON that the engine makes of it."""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\nToday: ' ~ date_string ~ '\\n' ~ system_message ~ '<|eot|>' }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls | length != 1 %}
        {{- raise_exception('one tool call at a time') }}
    {%- elif message.tool_calls is defined %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}<|eot|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start|>ipython<|end|>' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' ~ message['role'] ~ '<|end|>\\n' ~ message['content'] | trim ~ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n' }}{%- endif %}
"""
"""Trims content, cuts the system message off the list, refuses parallel calls."""

QWEN = """\
{%- macro render_content(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for item in content %}
            {%- if 'text' in item %}{{- item.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ render_content(messages[0].content) ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render_content(message.content) %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('the system message comes first') }}{%- endif %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\\n' ~ reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '\\n<' ~ name ~ '>' ~ (value | tojson if value is not string else value) }}
            {%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""A macro that takes text or parts, thinking kept since the last question only."""

PARTS = """\
{%- for message in messages %}
    {{- '[' ~ message['role'] ~ ']' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '(' ~ part | tojson ~ ')' if part['type'] == 'text' else '(?)' }}
        {%- endfor %}
    {%- endif %}
    {%- if message.reasoning %}{{- '{' ~ message.reasoning ~ '}' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}
"""
"""Loops over the parts of a message's content."""

MACRO = """\
{%- macro show(role, body=none) %}
    {{- '[' ~ role ~ ']' }}
    {%- if body is string %}{{- body }}{%- else %}
        {%- for part in body %}{{- '(' ~ part.text ~ ')' }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for turn in messages %}{{- show(turn.role, body=turn.content) }}{%- endfor %}
"""
"""Loops over a macro's parameter, which a keyword argument fills with the content."""

ALIAS = """\
{%- set chat = messages[1:] if false else messages | list %}
{%- set history = messages[0:] %}
{%- set turns = history %}
{%- for turn in turns %}
    {{- '[' ~ turn.role ~ ']' }}
    {%- if turn.content is string %}{{- turn.content }}{%- else %}
        {%- for part in turn.content %}{{- '(' ~ part.text ~ ')' }}{%- endfor %}
    {%- endif %}
{%- endfor %}
"""
"""Loops over the parts of messages that go by another name."""

DEVELOPER = """\
{%- for message in messages %}
    {%- if message.role == "developer" %}
        {{- '<dev>' ~ message.content ~ (message.tools | tojson if message.tools else '') }}
    {%- else %}
        {{- '<' ~ message.role ~ ':' ~ (message.name or '') ~ '>' ~ message.content }}
    {%- endif %}
{%- endfor %}
"""
"""Knows the developer's role, and names."""

STYLES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "parts": PARTS,
    "macro": MACRO,
    "alias": ALIAS,
    "developer": DEVELOPER,
}
