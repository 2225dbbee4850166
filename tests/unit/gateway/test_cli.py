"""The `moongate` command: exit codes, and what it prints."""

import json
import os
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from processes import MOONGATE

from moongate.cli import main
from moongate.local_stack import StackError, default_engine_python

GOOD = """\
policy: {name: least_loaded}
instances:
  - {id: a, url: http://127.0.0.1:8101}
  - {id: b, url: http://127.0.0.1:8102}
"""
COMMANDS = (
    ["serve"],
    ["up"],
    ["check"],
    ["explain"],
    ["sim-engine"],
    ["engine"],
    ["engine", "command"],
    ["engine", "serve"],
    ["engine", "store-command"],
    ["engine", "store-serve"],
    ["engine", "master-command"],
    ["engine", "master-serve"],
)


def exit_code_of(*arguments: str) -> object:
    """Return the exit code of a command line that the parser itself ends."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --- check ----------------------------------------------------------------------------------------


def test_a_file_without_instances_says_that_they_announce_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.yaml", "instances: []\n")
    assert main(["check", "-c", file]) == 0
    said = "ok; policy kv_cost, instances: none (they announce themselves)"
    assert capsys.readouterr().out == f"{file}: {said}\n"


def test_a_good_file_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "m.yaml", GOOD)
    assert main(["check", "-c", file]) == 0
    assert capsys.readouterr().out == f"{file}: ok; policy least_loaded, instances a, b\n"


@pytest.mark.parametrize("command", ["check", "serve"])
def test_c96_a_bad_file_gets_a_line_for_each_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = write(tmp_path / "m.yaml", "polcy: x\nlisten: {port: -1}\n" + GOOD)
    assert main([command, "-c", file]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"moongate: {file}:2: listen.port: Input should be greater than")
    assert lines[1].startswith(f"moongate: {file}:1: polcy: unknown key (did you mean policy?)")


def test_a_file_that_is_not_there_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-c", "/nowhere/m.yaml"]) == 1
    assert capsys.readouterr().err.startswith("moongate: /nowhere/m.yaml: can't be read: ")


# --- used wrongly ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["check"],
        ["serve", "-c", "x", "--port", "70000"],
        ["serve", "-c", "x", "--port", "²"],
        ["up", "--engines", "0"],
        ["up", "--engine", "gpt"],
        ["engine"],
        ["engine", "command"],
        ["--log-level", "loud", "check", "-c", "x"],
    ],
)
def test_a_command_line_that_makes_no_sense_exits_with_2(arguments: list[str]) -> None:
    assert exit_code_of(*arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["up", "--policy", "kv_awre"], "unknown policy 'kv_awre'"),
        (["up", "--engine", "vllm"], "--engine vllm needs --model DIR"),
    ],
)
def test_a_local_stack_that_can_not_be_exits_with_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"moongate: {problem}")


def test_an_installed_package_says_that_it_has_no_engines(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="works in a checkout only"):
        default_engine_python(tmp_path)
    (tmp_path / "Makefile").touch()
    with pytest.raises(StackError, match="does not exist; `make setup-engine` makes it"):
        default_engine_python(tmp_path)
    python = tmp_path / ".venv-engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert default_engine_python(tmp_path) == str(python)


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(*command, "--help") == 0
    assert f"usage: moongate {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        (["up"], {"--engines": "3", "--engine": "sim", "--port": "8000", "--policy": "kv_cost",
                  "--model": "its own"}),
        (["explain"], {"--url": "http://127.0.0.1:8000"}),
        (
            ["engine", "command"],
            {"--host": "127.0.0.1", "--port": "8101", "--kv-events-port": "5601",
             "--kv-replay-port": "6601", "--device": "gpu", "--served-model-name": "the model's",
             "--block-size": "vLLM's", "--max-model-len": "the model's",
             "--dtype": "the model's own", "--python": "this one"},
        ),
    ],
)  # fmt: skip
def test_help_states_the_defaults(
    command: list[str], defaults: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code_of(*command, "--help")
    text = " ".join(capsys.readouterr().out.split("options:")[1].split())
    stated = {
        option: text.split(f" {option} ")[-1].split("default: ")[1].split(")")[0]
        for option in defaults
    }
    assert stated == defaults


def test_every_option_of_the_simulated_engine_states_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code_of("sim-engine", "--help")
    _, *options = capsys.readouterr().out.split("\n  --")
    required = [text.split()[0] for text in options if "(default" not in text]
    assert required == ["port"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out.startswith("moongate 0.")


# --- engine command -------------------------------------------------------------------------------


def test_the_engines_command_is_one_line_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["engine", "command", "--model", "/models/my model", "--port", "8105"]
    assert main([*arguments, "--python", "py", "--", "--seed", "7"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = shlex.split(line)
    assert "PYTHONHASHSEED=0" in words
    start = words.index("py")
    assert words[start : start + 5] == (
        ["py", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/my model"]
    )
    config = json.loads(words[words.index("--kv-events-config") + 1])
    assert config["topic"] == "kv@127.0.0.1:8105@my model"
    assert words[-2:] == ["--seed", "7"]


def test_an_engine_that_can_not_be_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "m", "--device", "cpu", "--block-size", "7"]
    assert main(["engine", "command", *arguments]) == 2
    assert capsys.readouterr().err.startswith("moongate: ")


def test_an_interpreter_that_is_not_there_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "serve", "--model", "m", "--python", "/nowhere/python"]) == 1
    assert capsys.readouterr().err == "moongate: /nowhere/python: No such file or directory\n"


# --- explain --------------------------------------------------------------------------------------


def test_explain_against_a_closed_port_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"moongate: {url}: ")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[::1", "ftp://h"])
def test_explain_of_an_address_that_is_none_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"moongate: {url}: ")


def test_explain_without_its_file_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-f", "/nowhere/request.json"]) == 1
    assert capsys.readouterr().err == "moongate: /nowhere/request.json: No such file or directory\n"


@pytest.fixture
def keys_seen() -> Iterator[tuple[str, list[str | None]]]:
    """A gateway's address, and the keys that it was sent."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.headers.get("authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


@pytest.mark.parametrize(
    ("set_variables", "words", "sent"),
    [
        ({}, (), None),
        ({"MOONGATE_ADMIN_KEY": "one"}, (), "Bearer one"),
        ({"MOONGATE_ADMIN_KEY": "one", "OTHER": "two"}, ("--admin-key-env", "OTHER"), "Bearer two"),
    ],
)
def test_explain_sends_the_admin_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys_seen: tuple[str, list[str | None]],
    set_variables: dict[str, str],
    words: tuple[str, ...],
    sent: str | None,
) -> None:
    monkeypatch.delenv("MOONGATE_ADMIN_KEY", raising=False)
    for name, value in set_variables.items():
        monkeypatch.setenv(name, value)
    url, seen = keys_seen
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--url", url, *words]) == 0
    assert seen == [sent]


@pytest.fixture
def asked() -> Iterator[tuple[str, dict[str, str | None]]]:
    """A server's address; what it was asked for last, and what it answers (`status`, `body`)."""
    told: dict[str, str | None] = {"status": "200", "body": "{}"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            told.update(path=self.path, session=self.headers.get("x-session-id"))
            self.send_response(int(told["status"] or 0))
            self.end_headers()
            self.wfile.write((told["body"] or "").encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", told
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_explain_asks_for_a_session_at_the_address_that_clients_have(
    tmp_path: Path, asked: tuple[str, dict[str, str | None]], end: str
) -> None:
    url, told = asked
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--url", url + end, "--session", "a b"]) == 0
    assert (told["path"], told["session"]) == ("/admin/explain", "a b")


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        ("404", "<html>\n<h1>Not here</h1>\n</html>", "it is no gateway"),
        ("502", "<html>", "Bad Gateway"),
        ("400", '{"error":{"message":"model: missing"}}', "model: missing"),
        (
            "401",
            '{"error":{"message":"no key"}}',
            "no key; set MOONGATE_ADMIN_KEY, or name another",
        ),
        ("200", "<html>", "it is no gateway"),
    ],
)
def test_explain_says_in_one_line_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: tuple[str, dict[str, str | None]],
    status: str,
    answer: str,
    text: str,
) -> None:
    url, told = asked
    told.update(status=status, body=answer)
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"moongate: {url} ")
    assert error.count("\n") == 1
    assert text.removeprefix("it is ") in error


def test_explain_with_a_variable_that_is_not_set_is_misused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = write(tmp_path / "request.json", "{}")
    assert main(["explain", "-f", body, "--admin-key-env", "NOT_THERE_X"]) == 2
    told = "moongate: --admin-key-env: the variable NOT_THERE_X is not set\n"
    assert capsys.readouterr().err == told


# --- output that is read by others, and words that are wrong --------------------------------------


@pytest.mark.parametrize(
    "command", [("engine", "command", "--model", "m"), ("engine", "master-command")]
)
def test_a_reader_that_goes_away_ends_a_command_without_a_word(command: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `head` does, but certainly before anything is written
    try:
        done = subprocess.run(
            [*MOONGATE, *command], stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["loadtest", "engine"])
def test_an_option_that_is_unknown_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(command, "--nope", "3") == 2
    told = f"unrecognized arguments: --nope (see moongate {command} --help)"
    assert capsys.readouterr().err == f"moongate {command}: {told}\n"


def test_what_is_missing_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("engine", "command") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "problem"),
    [("--json", "No such file or directory"), ("--plots", "Not a directory")],
)
def test_a_simulation_that_can_not_be_written_is_not_run(
    option: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    path = tmp_path / "none/x" if option == "--json" else file / "x"
    assert main(["simulate", "--preset", "scale-1000", option, str(path)]) == 1
    assert capsys.readouterr().err == f"moongate: {option} {path}: {problem}\n"
    assert main(["simulate", "--preset", "scale-1000", "--plots", str(file)]) == 1
    assert capsys.readouterr().err == f"moongate: --plots {file}: not a folder\n"
