"""The flags of `moongate sim-engine`, and what an answer may be made of."""

import argparse
from pathlib import Path

import pytest

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.simulator.server import (
    BUNDLED_TOKENIZER,
    SimConfigError,
    SimEngineConfig,
    add_arguments,
    config_from_arguments,
    output_token_ids,
)
from moongate.simulator.transfer import Connector, Role


def parse(*flags: str) -> SimEngineConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_arguments(parser.parse_args(["--port", "8101", *flags]))


def test_flags_reach_the_configuration() -> None:
    config = parse(
        *("--model", "m", "--tokenizer", "/t", "--kv-events-port", "5601", "--topic", "kv@x"),
        *("--kv-replay-port", "6601", "--blocks", "101", "--block-size", "8"),
        *("--prefill-tokens-per-s", "500", "--decode-tokens-per-s", "2.5"),
        *("--max-num-seqs", "3", "--data-parallel-size", "2", "--data-parallel-start-rank", "4"),
    )
    assert (config.port, config.model, config.tokenizer) == (8101, "m", Path("/t"))
    assert (config.kv_events_port, config.kv_replay_port, config.topic) == (5601, 6601, "kv@x")
    assert (config.profile.blocks, config.profile.block_size_tokens) == (101, 8)
    assert config.profile.prefill_tokens_per_s == 500
    assert config.profile.decode_tokens_per_s == 2.5
    assert config.profile.max_num_seqs == 3
    assert list(config.ranks) == [4, 5]


def test_flags_of_a_hand_off_reach_the_configuration() -> None:
    config = parse(
        *("--role", "prefill", "--bootstrap-port", "8998", "--transfer-hold-s", "2.5"),
        *("--kv-bytes-per-token", "100", "--kv-link-bytes-per-s", "1e6"),
    )
    assert (config.role, config.connector) == (Role.PREFILL, Connector.MOONCAKE)
    assert (config.bootstrap_port, config.transfer_hold_s) == (8998, 2.5)
    assert (config.profile.kv_bytes_per_token, config.profile.kv_link_bytes_per_s) == (100, 1e6)
    assert parse("--role", "decode", "--kv-connector", "nixl").connector is Connector.NIXL
    assert parse().connector is Connector.NONE


def test_without_flags_there_are_no_events_and_the_own_tokenizer() -> None:
    config = parse()
    assert (config.kv_events_port, config.kv_replay_port) == (None, None)
    assert config.tokenizer == BUNDLED_TOKENIZER


def test_the_longest_request_follows_from_the_cache() -> None:
    assert parse("--blocks", "11", "--block-size", "16").profile.max_model_len_tokens == 160
    assert parse("--blocks", "100000").profile.max_model_len_tokens == 131_072


def test_digests_start_from_the_hash_seed_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert parse().hash_seed == "7"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert parse().hash_seed == "vllm-none-hash"


def test_a_script_is_read_with_the_flags(tmp_path: Path) -> None:
    assert parse().script is None
    file = tmp_path / "script.jsonl"
    file.write_text('{"answers": [{"text": "a"}]}')
    script = parse("--script", str(file)).script
    assert script is not None
    assert script.root[0].answers[0].text == "a"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--blocks", "0"), "must be more than 0, got 0"),
        (("--block-size", "x"), "'x' is not a whole number"),
        (("--decode-tokens-per-s", "nan"), "must be more than 0, got nan"),
        (("--kv-events-port", "70000"), "'70000' is not a port"),
    ],
)
def test_a_bad_value_ends_with_2_and_says_why(
    flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--blocks", "1"), "no room for a prompt"),
        (("--kv-events-port", "8101"), "port 8101 is used twice"),
        (("--data-parallel-start-rank", "-1"), "start rank at least 0"),
        (("--role", "prefill", "--bootstrap-port", "8101"), "port 8101 is used twice"),
        (("--role", "decode", "--kv-connector", "none"), "role decode needs a connector"),
        (("--kv-connector", "multi"), "multi needs a pool, which engines share only in process"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: tuple[str, str], message: str
) -> None:
    with pytest.raises(SimConfigError, match=message):
        parse(*flags)


def test_answers_are_made_of_printable_ascii_tokens_only() -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    ids = output_token_ids(renderer.decode)
    assert len(ids) > 1000
    text = renderer.decode(ids)
    assert text.isascii()
    assert text.isprintable()


def test_the_own_tokenizer_has_2048_tokens_and_is_small() -> None:
    assert ModelRenderer.load(BUNDLED_TOKENIZER).vocabulary_size == 2048
    assert (BUNDLED_TOKENIZER / "tokenizer.json").stat().st_size < 200_000


def test_the_own_template_keeps_earlier_turns_as_they_were() -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 北京"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = [
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    first = renderer.chat_text({"messages": history, "tools": tools})
    second = renderer.chat_text({"messages": history + turn, "tools": tools})
    assert second.startswith(first)
    assert second[len(first) :] == (
        'x\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
