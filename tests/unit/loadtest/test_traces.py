"""Readers of recorded traces: who shares what with whom, told by ids alone."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
from made_traces import (
    agentic_request,
    write_agentic,
    write_growing_agentic,
    write_messages,
    write_mooncake,
)

from moongate.loadtest.traces import (
    TraceConversation,
    TraceError,
    TraceFormat,
    find_traces,
    read_agentic,
    read_messages,
    read_mooncake,
)

SHARED_TRACES = Path(__file__).parents[4] / "shared" / "traces"


def shared_blocks(one: TraceConversation, other: TraceConversation, turn: int = 0) -> int:
    pairs = zip(one.requests[turn].blocks, other.requests[turn].blocks, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_conversation_shares_with_itself_as_its_ids_say(tmp_path: Path) -> None:
    conversation = read_agentic(write_growing_agentic(tmp_path, "one", turns=3))
    first, second, third = (request.blocks for request in conversation.requests)
    assert [len(blocks) for blocks in (first, second, third)] == [6, 9, 12]
    assert list(third[:9]) == list(second)
    assert [request.prompt_tokens for request in conversation.requests] == [394, 586, 778]
    assert [request.think_s for request in conversation.requests] == [0.0, 0.5, 0.5]


def test_conversations_share_tools_and_system_prompt_of_the_same_length(tmp_path: Path) -> None:
    ids = [agentic_request(0.0, 394, range(1, 7))]
    one = read_agentic(write_agentic(tmp_path, "one", ids))
    same = read_agentic(write_agentic(tmp_path, "same", ids))
    other_system = read_agentic(write_agentic(tmp_path, "other", ids, system=128))
    other_tools = read_agentic(write_agentic(tmp_path, "tools", ids, tools=192))
    assert shared_blocks(one, same) == 3  # (128 + 64) / 64
    assert shared_blocks(one, other_system) == 2
    assert shared_blocks(one, other_tools) == 0


def test_ids_that_count_within_a_file_are_told_apart_without_sharing(tmp_path: Path) -> None:
    ids = [agentic_request(0.0, 394, range(1, 7))]
    files = [write_agentic(tmp_path, name, ids) for name in ("one", "two")]
    one, two = (read_agentic(file, shares_system=False) for file in files)
    assert shared_blocks(one, two) == 0
    assert len(set(one.requests[0].blocks) | set(two.requests[0].blocks)) == 12


def test_sub_agents_take_their_turns_where_they_were_called(tmp_path: Path) -> None:
    sub = {
        "t": 5.0, "type": "subagent", "models": ["small"], "tool_tokens": 0, "system_tokens": 0,
        "requests": [agentic_request(1.0, 70, [90], model="small")],
    }  # fmt: skip
    requests = [agentic_request(0.0, 70, [1]), sub, agentic_request(9.0, 135, [1, 2])]
    conversation = read_agentic(write_agentic(tmp_path, "one", requests, tools=0, system=0))
    assert [(r.at_s, r.model) for r in conversation.requests] == [
        (0.0, "large"),
        (6.0, "small"),
        (9.0, "large"),
    ]


def test_mooncake_requests_stand_alone_and_share_by_global_ids(tmp_path: Path) -> None:
    file = write_mooncake(tmp_path, [(0, 1030, [0, 1, 2]), (1500, 1100, [0, 1, 7])])
    one, two = read_mooncake(file)
    assert [len(c.requests[0].blocks) for c in (one, two)] == [2, 2]  # the last block isn't full
    assert shared_blocks(one, two) == 2
    assert (two.starts_at_s, two.requests[0].at_s, two.block_size_tokens) == (1.5, 1.5, 512)


def test_messages_give_a_turn_for_each_answer(tmp_path: Path) -> None:
    words = "word " * 200
    messages = [
        {"role": "user", "content": words, "timestamp": 10.0},
        {"role": "assistant", "content": "yes", "timestamp": 12.0},
        {"role": "tool", "content": [{"type": "text", "text": words}], "timestamp": 15.5},
        {"role": "assistant", "content": "done " * 8},
    ]
    file = write_messages(tmp_path, [{"id": "c", "messages": messages}, messages[:2]])
    one, two = read_messages(file)
    assert (one.id, two.id, len(one.requests), len(two.requests)) == ("c", "line_2", 2, 1)
    first, second = one.requests
    assert first.prompt_tokens == 252  # 1006 bytes, four a token
    assert list(second.blocks[:3]) == list(first.blocks) == list(two.requests[0].blocks)
    assert (first.think_s, second.think_s, second.at_s) == (0.0, 3.5, 5.5)


def test_a_folder_s_traces_are_found_by_format(tmp_path: Path) -> None:
    write_growing_agentic(tmp_path / "a", "two", turns=1)
    write_growing_agentic(tmp_path / "a", "one", turns=1)
    write_mooncake(tmp_path / "m", [(0, 600, [0, 1])])
    (tmp_path / "README.md").write_text("not a trace")
    found = find_traces(tmp_path)
    assert {name: len(traces.files) for name, traces in found.items()} == {
        TraceFormat.AGENTIC: 2,
        TraceFormat.MOONCAKE: 1,
    }
    assert [c.id for c in found[TraceFormat.AGENTIC].read()] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("odd.json", b'{"a": 1}', "neither agentic, nor mooncake"),
        ("cut.json.gz", b"\x1f\x8b\x08", "cut.json.gz"),
        ("bad.json", b'{"block_size": 64, "id": "x"}', "not an agentic trace: KeyError"),
        ("bad.jsonl", b'{"input_length": 5}\n', "bad.jsonl:1: not a mooncake trace"),
        ("torn.jsonl", b'{"input_length": 5\n', "torn.jsonl:1: not a mooncake trace"),
        ("bad2.jsonl", b'{"messages": 5}\n', "bad2.jsonl:1: not a messages trace"),
    ],
)
def test_a_file_that_is_no_trace_is_said(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=told):
        [list(traces.read()) for traces in find_traces(tmp_path).values()]


def test_a_missing_or_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        find_traces(tmp_path / "none")
    with pytest.raises(TraceError, match=r"no \*\.json"):
        find_traces(tmp_path)


@pytest.mark.skipif(not SHARED_TRACES.exists(), reason="the real traces are not on this machine")
def test_the_real_traces_are_read() -> None:
    found = find_traces(SHARED_TRACES)
    conversation = next(iter(found[TraceFormat.AGENTIC].read()))
    assert all(
        len(request.blocks) == request.prompt_tokens // conversation.block_size_tokens
        for request in conversation.requests
    )
    assert sum(1 for _ in found[TraceFormat.MOONCAKE].read()) == 12031
