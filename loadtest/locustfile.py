"""The locust users, one class a preset; `moongate loadtest` runs this file in a process of its own, and
`locust -f loadtest/locustfile.py --preset agents --host URL …` runs it as any other, on several
machines if need be.

Theory of operation. A user is one client in a closed loop: its task sends one turn, and its wait time
is the pause before the next, so locust stops it between turns and lets a turn end that is under way.
`OpenLoop` is one user that begins conversations when they are due, each in a greenlet of its own,
however long others take: arrivals are drawn ahead of time and don't know the server. What is measured
goes to locust's statistics and, with `--records`, to files.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
import orjson
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser

from moongate.loadtest.conversations import Conversation, Turn, Workload, poisson_arrivals
from moongate.loadtest.generator import Recorder, Watch, write_summary
from moongate.loadtest.records import TurnRecord
from moongate.loadtest.sending import Sender, Target
from moongate.loadtest.settings import (
    DEFAULT_URL,
    INTERNAL_OPTIONS,
    OPTIONS,
    Preset,
    WorkloadSettings,
    add_workload_arguments,
    settings_from,
)
from moongate.loadtest.traces import TraceError

OPEN_CONVERSATIONS_MAX = 2000
"""An open loop doesn't open more at a time; what is due then counts as not sent."""

AFTER_FAILURE_S = 1.0
"""A user whose turn failed waits for so long, and begins another conversation."""

PROGRESS_S = 1.0


@dataclass(slots=True)
class Run:
    """What the users of one run share."""

    settings: WorkloadSettings
    workload: Workload
    target: Target
    recorder: Recorder
    watch: Watch
    folder: Path | None
    start_s: float
    open_conversations: int = 0
    latest_end_s: float = 0.0
    is_stopping: bool = False
    """Nothing more is sent. Locust kills users that wait, but one whose wait is over just then still
    comes to its task."""

    def sender(self) -> Sender:
        return Sender(self.target, self.start_s, self.recorder.take)

    def since_start_s(self) -> float:
        return time.perf_counter() - self.start_s


# --- locust's events ------------------------------------------------------------------------------


@events.init_command_line_parser.add_listener
def _add_arguments(parser: Any) -> None:
    add_workload_arguments(parser, (*OPTIONS, *INTERNAL_OPTIONS), for_locust=True)
    parser.add_argument("--records", type=Path, help="folder for the files of a run",
                        env_var="MOONGATE_LOADTEST_RECORDS", include_in_web_ui=False)  # fmt: skip
    parser.add_argument("--api-key-env", help="variable with the API key",
                        env_var="MOONGATE_LOADTEST_API_KEY_ENV", include_in_web_ui=False)  # fmt: skip
    parser.add_argument("--ca", help="roots to trust for an https server",
                        env_var="MOONGATE_LOADTEST_CA", include_in_web_ui=False)  # fmt: skip
    parser.add_argument("--progress", action="store_true", include_in_web_ui=False,
                        help="print a line of JSON each second")  # fmt: skip


@events.init.add_listener
def _choose_users(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    assert options is not None
    try:
        settings = settings_from(options, seed=int(time.time()))
        environment.moongate_settings = settings  # type: ignore[attr-defined]
        Workload(settings)
    except (ValueError, TraceError) as error:
        sys.exit(f"moongate loadtest: {error}")
    user = OpenLoop if settings.rate_per_s is not None else USERS[settings.preset]
    environment.user_classes = [user]


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    options, settings = environment.parsed_options, environment.moongate_settings  # type: ignore[attr-defined]
    assert options is not None
    environment.moongate_run = Run(  # type: ignore[attr-defined]
        settings=settings,
        workload=Workload(settings),
        target=Target(
            url=environment.host or DEFAULT_URL,
            model=settings.model,
            api_key=os.environ.get(options.api_key_env) if options.api_key_env else None,
            sends_session_ids=settings.sends_session_ids,
            ca=options.ca,
        ),
        recorder=Recorder(environment, options.records),
        watch=Watch(),
        folder=options.records,
        start_s=time.perf_counter(),
    )
    if options.progress:
        gevent.spawn(_print_progress, environment, environment.moongate_run)  # type: ignore[attr-defined]


@events.test_stopping.add_listener
def _stop_sending(environment: Environment, **_: Any) -> None:
    environment.moongate_run.is_stopping = True  # type: ignore[attr-defined]


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    run: Run = environment.moongate_run  # type: ignore[attr-defined]
    run.watch.stop()
    run.recorder.close()
    if run.folder is not None:
        write_summary(run.folder, run.recorder, run.watch, run.latest_end_s)


def _print_progress(environment: Environment, run: Run) -> None:
    while environment.moongate_run is run:  # type: ignore[attr-defined]
        gevent.sleep(PROGRESS_S)
        recent = sorted(run.recorder.latest_ttft_ms)
        run.recorder.latest_ttft_ms = []
        outcomes = run.recorder.outcomes
        progress = {
            "at_s": run.since_start_s(),
            "turns": outcomes.total(),
            "failures": outcomes.total() - outcomes["ok"],
            "open": run.open_conversations,
            "ttft_ms_p50": recent[len(recent) // 2] if recent else None,
            "cpu_share": run.watch.cpu_shares[-1] if run.watch.cpu_shares else None,
        }
        print(orjson.dumps(progress).decode(), flush=True)


# --- users ----------------------------------------------------------------------------------------


class ConversationUser(User):
    """A client that holds one conversation after the other, and waits for each answer."""

    abstract = True

    def on_start(self) -> None:
        self._run: Run = self.environment.moongate_run
        self._sender = self._run.sender()
        self._conversation: Conversation | None = None
        self._turn: Turn | None = None
        self._due_s = time.perf_counter()
        if self._run.settings.preset is Preset.COLD_BURST:
            self._pause_before_next()

    def on_stop(self) -> None:
        self._sender.close()
        self._leave()

    def wait_time(self) -> float:
        """Return the time until the next turn is due (s)."""
        return max(self._due_s - time.perf_counter(), 0.0)

    @task
    def take_turn(self) -> None:
        """Send the turn that is due; none if the first one isn't yet."""
        if self._run.is_stopping:
            raise StopUser
        if self.wait_time() > 0:
            return
        if self._turn is None:
            self._begin()
        assert self._conversation is not None
        assert self._turn is not None
        answered = self._sender.send(self._conversation, self._turn, self._due_s)
        self._due_s = time.perf_counter()
        self._run.latest_end_s = self._run.since_start_s()
        if not answered.record.is_ok:
            self._leave()
            self._due_s += AFTER_FAILURE_S
            return
        self._conversation.answered(answered.text)
        self._turn = self._conversation.next_turn()
        if self._turn is None:
            self._leave()
            self._pause_before_next()
        else:
            self._due_s += self._turn.pause_s

    def _begin(self) -> None:
        self._conversation = self._run.workload.begin(self._run.since_start_s())
        self._turn = self._conversation.next_turn()
        self._run.open_conversations += 1

    def _leave(self) -> None:
        if self._conversation is not None:
            self._run.open_conversations -= 1
        self._conversation = self._turn = None

    def _pause_before_next(self) -> None:
        self._due_s += self._run.workload.starts_after_s(self._due_s - self._run.start_s)


class AgentSession(ConversationUser):
    """Multi-turn with tools, a growing history and think time."""


class TraceReplay(ConversationUser):
    """Recorded conversations, one after the other."""


class SharedSystemPrompt(ConversationUser):
    """Short questions behind a few long system prompts."""


class ColdBurst(ConversationUser):
    """All at once, with a long prefix that nobody has yet."""


USERS: dict[Preset, type[ConversationUser]] = {
    Preset.AGENTS: AgentSession,
    Preset.TRACE: TraceReplay,
    Preset.SHARED_PROMPT: SharedSystemPrompt,
    Preset.COLD_BURST: ColdBurst,
}


class OpenLoop(User):
    """Begins conversations at a given rate, whatever becomes of them."""

    fixed_count = 1

    def on_start(self) -> None:
        self._run: Run = self.environment.moongate_run
        rate_per_s = self._run.settings.rate_per_s
        assert rate_per_s is not None, "chosen for its rate"
        self._arrivals = poisson_arrivals(
            rate_per_s, random.Random(f"arrivals/{self._run.settings.seed}").random
        )
        self._next_s = next(self._arrivals)
        self._conversations = Group()
        self._pausing: set[gevent.Greenlet] = set()

    def wait_time(self) -> float:
        """Return the time until the next arrival (s)."""
        return max(self._next_s - self._run.since_start_s(), 0.0)

    @task
    def begin_what_is_due(self) -> None:
        """Begin every conversation whose time has come, also those that this process is late for."""
        if self._run.is_stopping:
            raise StopUser
        while self._next_s <= self._run.since_start_s():
            self._arrive(self._run.start_s + self._next_s)
            self._next_s = next(self._arrivals)

    def on_stop(self) -> None:
        """Let turns end that are under way, as long as locust grants to users, then cut them off."""
        for greenlet in tuple(self._pausing):
            greenlet.kill()
        self._conversations.join(timeout=self.environment.stop_timeout or 0.0)
        self._conversations.kill()

    def _arrive(self, due_s: float) -> None:
        conversation = self._run.workload.begin(due_s - self._run.start_s)
        if len(self._conversations) >= OPEN_CONVERSATIONS_MAX:
            unsent = TurnRecord(conversation.id, 1, due_s - self._run.start_s)
            self._run.recorder.take_unsent(unsent)
            return
        self._conversations.spawn(self._hold, conversation, due_s)

    def _hold(self, conversation: Conversation, due_s: float) -> None:
        """Take all turns of a conversation whose first is due at `due_s`."""
        run, sender = self._run, self._run.sender()
        run.open_conversations += 1
        try:
            while (turn := conversation.next_turn()) is not None:
                due_s += turn.pause_s
                if not self._pause_until(due_s):
                    return
                answered = sender.send(conversation, turn, due_s)
                due_s = time.perf_counter()
                run.latest_end_s = run.since_start_s()
                if not answered.record.is_ok:
                    return
                conversation.answered(answered.text)
        finally:
            run.open_conversations -= 1
            sender.close()

    def _pause_until(self, due_s: float) -> bool:
        """Wait until then; tell whether a turn may still be sent."""
        if self._has_stopped():
            return False
        own = gevent.getcurrent()
        self._pausing.add(own)
        try:
            gevent.sleep(max(due_s - time.perf_counter(), 0.0))
        finally:
            self._pausing.discard(own)
        return not self._has_stopped()

    def _has_stopped(self) -> bool:
        return self._run.is_stopping
