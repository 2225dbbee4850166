"""Blocks in runs: exact small stories, and equality with the pool that has every block."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moongate.simulator.blocks import BlockPool, BlockRemoved, TokenSequence, make_root_digest
from moongate.simulator.content import Branch, Library
from moongate.simulator.run_cache import RunCache

ROOT = make_root_digest()
SIZE = 4


def compute(cache: RunCache, branch: Branch, blocks: int) -> int:
    """Compute a prompt from its start to its end, and let it go. Return what was reused."""
    reused = cache.find(branch, blocks - 1)
    hold = cache.hold(branch, reused)
    assert cache.allocate(hold, blocks)
    cache.fill(hold, blocks)
    cache.release(hold)
    return reused


def test_the_end_of_what_was_used_longest_ago_is_evicted_first() -> None:
    gone: list[tuple[Branch, int, int]] = []
    cache = RunCache(10, lambda *part: gone.append(part))
    old, young = Branch(1), Branch(2)
    compute(cache, old, 4)
    compute(cache, young, 4)
    assert compute(cache, Branch(3), 4) == 0
    assert gone == [(old, 2, 4)]
    assert (cache.find(old, 9), cache.find(young, 9)) == (2, 4)


def test_a_fork_holds_what_it_shares_with_its_parent() -> None:
    cache = RunCache(10)
    trunk = Branch(1)
    compute(cache, trunk, 6)
    fork = Branch(2, trunk, 3)
    hold = cache.hold(fork, cache.find(fork, 5))
    assert hold.length == 3
    assert cache.free == 7  # of the trunk its end can go, and four were never used
    assert cache.allocate(hold, 10)
    assert cache.find(trunk, 6) == 3


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    cache = RunCache(5)
    held = cache.hold(Branch(1), 0)
    assert cache.allocate(held, 3)
    hold = cache.hold(Branch(2), 0)
    assert not cache.allocate(hold, 3)
    assert (cache.free, hold.blocks) == (2, 0)


def test_blocks_that_are_not_full_are_of_no_use_to_anybody_later() -> None:
    cache = RunCache(5)
    branch = Branch(1)
    hold = cache.hold(branch, 0)
    cache.allocate(hold, 3)
    cache.fill(hold, 2)
    cache.release(hold)
    assert (cache.find(branch, 9), cache.used) == (2, 2)


def test_a_second_copy_takes_room_until_its_turn_comes() -> None:
    cache = RunCache(8)
    branch = Branch(1)
    first, second = cache.hold(branch, 0), cache.hold(branch, 0)
    for hold in (first, second):
        cache.allocate(hold, 3)
        cache.fill(hold, 3)
    assert (cache.used, second.copies) == (6, 3)
    cache.release(first)
    cache.release(second)
    assert (cache.free, cache.used) == (8, 6)
    assert compute(cache, Branch(2), 5) == 0
    assert cache.find(branch, 9) == 3  # the copies went first


def test_put_keeps_the_beginning_where_room_is_short() -> None:
    cache = RunCache(4)
    hold = cache.hold(Branch(1), 0)
    cache.allocate(hold, 2)
    assert cache.put(Branch(2), 5) == 0
    assert (cache.used, cache.free) == (4, 2)


@dataclass
class _Both:
    """The same prompts into both pools, one or several at once."""

    capacity: int
    library: Library = field(default_factory=Library)
    gone: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exact = BlockPool(self.capacity + 1, SIZE)
        self.coarse = RunCache(self.capacity, self.removed)

    def removed(self, branch: Branch, first: int, last: int) -> None:
        self.gone += [branch.name(position) for position in reversed(range(first, last))]


def tokens_of(branch: Branch, blocks: int) -> list[int]:
    names = (branch.name(position) for position in range(blocks))
    return [token for name in names for token in (name, 1, 2, 3)]


@pytest.mark.parametrize("seed", range(40))
def test_runs_and_blocks_reuse_and_evict_the_same(seed: int) -> None:
    """Sequences of prompts that grow, fork, are repeated and overlap in time (of different branches)."""
    chance = random.Random(seed)
    both = _Both(capacity=chance.randint(20, 60))
    branches = [both.library.branch()]
    lengths = {branches[0]: 3}
    open_now: list[tuple[TokenSequence, object, Branch]] = []
    names: dict[bytes, int] = {}
    for _ in range(300):
        if open_now and (chance.random() < 0.5 or len(open_now) == 3):
            sequence, hold, _ = open_now.pop(chance.randrange(len(open_now)))
            both.exact.free(sequence)
            both.coarse.release(hold)  # type: ignore[arg-type]
            continue
        branch = choose(chance, both, branches, lengths)
        if any(branch is other or related(branch, other) for _, _, other in open_now):
            continue  # two that compute the same at once: the coarse model differs there
        blocks = lengths[branch]
        sequence = TokenSequence([*tokens_of(branch, blocks), 9], block_size_tokens=SIZE, root=ROOT)
        names |= {digest: branch.name(n) for n, digest in enumerate(sequence.digests)}
        reused = both.exact.find_cached_prefix(sequence)
        assert both.coarse.find(branch, blocks) == len(reused)
        fits = both.exact.has_room(sequence, len(sequence), reused)
        needed = both.coarse.missing(branch, len(reused), blocks + 1)
        assert fits == (needed <= both.coarse.free)
        if not fits:
            continue
        both.exact.allocate_slots(sequence, len(sequence), reused)
        hold = both.coarse.hold(branch, len(reused))
        both.coarse.allocate(hold, blocks + 1)
        both.coarse.fill(hold, blocks)
        open_now.append((sequence, hold, branch))
        removed = [e for e in both.exact.take_events() if isinstance(e, BlockRemoved)]
        assert [names[event.digest] for event in removed] == both.gone
        both.gone.clear()
        assert both.exact.free_blocks == both.coarse.free


def choose(
    chance: random.Random, both: _Both, branches: list[Branch], lengths: dict[Branch, int]
) -> Branch:
    """Return a branch that grew, a new one, a fork, or an old one again."""
    kind, branch = chance.random(), chance.choice(branches)
    if kind < 0.4:
        lengths[branch] += chance.randint(0, 3)
        return branch
    if kind < 0.6:
        made = both.library.branch()
        lengths[made] = chance.randint(1, 6)
    else:
        fork = chance.randint(1, lengths[branch])
        made = both.library.branch(branch, fork)
        lengths[made] = fork + chance.randint(1, 4)
    branches.append(made)
    return made


def related(branch: Branch, other: Branch) -> bool:
    """Tell whether two prompts share blocks."""

    def roots(node: Branch | None) -> set[Branch]:
        found = set()
        while node is not None:
            found.add(node)
            node = node.parent
        return found

    return bool(roots(branch) & roots(other))
