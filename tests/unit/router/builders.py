"""Small events, prompts and cores for the routing tests: block size 2, short ids, plain numbers."""

from collections.abc import Sequence

from moongate.router import (
    BatchReceived,
    BlockSpace,
    Command,
    Event,
    Forward,
    Holder,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Policy,
    Prompt,
    Request,
    RequestArrived,
    RequestId,
    Role,
    RouterCore,
    RouterLimits,
    SourceId,
    Tier,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksRemoved, BlocksStored, KvEvent
from moongate.router.model import WHOLE_PREFIX, BlockHash, EngineHash, ExtraKeys

SIZE = 2
SPACE = BlockSpace(SIZE)
MODEL = "m"
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
SOURCE_A, SOURCE_B = SourceId(A), SourceId(B)


def chain(*token_ids: int, space: BlockSpace = SPACE) -> list[BlockHash]:
    """Return the hashes of the full blocks of these tokens."""
    return hash_prompt(space, pack_tokens(token_ids))


def stored(
    *engine_hashes: EngineHash,
    tokens: Sequence[int],
    parent: EngineHash | None = None,
    size: int = SIZE,
    tier: Tier = Tier.DEVICE,
    lora: str | None = None,
    extra_keys: tuple[ExtraKeys | None, ...] | None = None,
    group: int = 0,
    is_full_attention: bool = True,
    needed_tokens: int | None = None,
) -> BlocksStored:
    return BlocksStored(
        engine_hashes,
        parent,
        pack_tokens(tokens),
        size,
        tier,
        lora,
        extra_keys,
        group,
        is_full_attention,
        needed_tokens,
    )


def side_stored(
    *engine_hashes: EngineHash,
    group: int,
    needed_tokens: int,
    size: int = SIZE,
    tier: Tier = Tier.DEVICE,
) -> BlocksStored:
    """Return the event of a KV group beside the main one; what it says of tokens isn't looked at."""
    is_full = needed_tokens == WHOLE_PREFIX
    return BlocksStored(
        engine_hashes, None, b"", size, tier, None, None, group, is_full, needed_tokens
    )


def removed(*engine_hashes: EngineHash, tier: Tier = Tier.DEVICE, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(engine_hashes, tier, group)


def batch(
    sequence: int,
    *events: KvEvent,
    source: SourceId = SOURCE_A,
    rank: int | None = None,
    replay_id: int | None = None,
    process: str = "p",
) -> BatchReceived:
    """Return the batch that a publisher's `process` sent under this number."""
    digest = f"{process}{sequence}".encode()
    return BatchReceived(source, sequence, events, digest, rank, replay_id)


def prompt(*token_ids: int, spaces: Sequence[BlockSpace] = (SPACE,)) -> Prompt:
    return Prompt(len(token_ids), {space: chain(*token_ids, space=space) for space in spaces})


def request(
    name: str,
    *token_ids: int,
    model: str = MODEL,
    spaces: Sequence[BlockSpace] = (SPACE,),
    session_key: str | None = None,
    policy: str | None = None,
) -> Request:
    """Return a request; without token ids nothing is known of its prompt."""
    known = prompt(*token_ids, spaces=spaces) if token_ids else None
    return Request(RequestId(name), model, known, session_key=session_key, policy=policy)


def arrived(
    name: str,
    *token_ids: int,
    model: str = MODEL,
    spaces: Sequence[BlockSpace] = (SPACE,),
    session_key: str | None = None,
    policy: str | None = None,
) -> RequestArrived:
    return RequestArrived(
        request(
            name, *token_ids, model=model, spaces=spaces, session_key=session_key, policy=policy
        )
    )


def facts(
    *models: str,
    size: int | None = SIZE,
    ranks: tuple[int, ...] = (),
    adapters: tuple[str, ...] = (),
    capacity_blocks: int | None = None,
) -> InstanceFacts:
    cards = [ModelCard(name) for name in models or (MODEL,)]
    cards += [ModelCard(name, is_adapter=True) for name in adapters]
    return InstanceFacts(tuple(cards), size, capacity_blocks, ranks)


def last_of_n(n: int) -> int:
    """A chance that always falls on the last."""
    return n - 1


def feed(core: RouterCore, *events: Event, now: float = 0.0) -> list[Command]:
    """Hand the events over one by one and return the commands of the last."""
    commands: list[Command] = []
    for event in events:
        commands = core.handle(event, now)
    return commands


def add(
    core: RouterCore,
    *instance_ids: InstanceId,
    described: InstanceFacts | None = None,
    role: Role = Role.BOTH,
    weight: float = 1.0,
) -> None:
    """Let instances join, be described and be found healthy."""
    for instance_id in instance_ids:
        feed(
            core,
            InstanceAdded(InstanceSpec(instance_id, role, weight)),
            InstanceDescribed(instance_id, described or facts()),
            InstanceProbed(instance_id, is_healthy=True),
        )


def make_core(
    *instance_ids: InstanceId,
    policy: str | Policy = "kv_cost",
    limits: RouterLimits | None = None,
    others: Sequence[Policy] = (),
) -> RouterCore:
    """Return a core with these instances up, at block size 2, without event sources."""
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    core = RouterCore(chosen, last_of_n, limits, others)
    add(core, *instance_ids)
    return core


def forward_in(commands: Sequence[Command]) -> Forward:
    """Return the one forward among the commands."""
    (forward,) = (command for command in commands if isinstance(command, Forward))
    return forward


def send(core: RouterCore, event: RequestArrived, now: float = 0.0) -> Holder:
    """Let a request arrive and return where it was forwarded."""
    return forward_in(core.handle(event, now)).holder
