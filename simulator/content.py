"""What prompts consist of, without their tokens: a tree of branches, in blocks.

A workload knows beforehand which prompts share how much. So a prompt is a *branch* and a number of leading
blocks: those up to the branch's fork are its parent's, and so on. A branch has no end of its own; it grows
as far as somebody asks. Tokens and our hashes of them are made up when the routing core wants them, and are
different for different branches. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from moongate.router.blocks import TOKEN_BYTES, extend_chain, root_hash
from moongate.router.model import BlockHash, BlockSpace

NUMBER_BITS = 24
"""A block's name is its branch's number and its position in so many bits: 16 M blocks a branch."""


class Branch:
    """A line of content. It leaves `parent` after `fork` blocks (None and 0: it begins at nothing)."""

    __slots__ = ("_chain", "fork", "number", "parent")

    def __init__(self, number: int, parent: Branch | None = None, fork: int = 0) -> None:
        assert (parent is not None) == (fork > 0), (parent, fork)
        self.number = number
        # Shared blocks belong to the ancestor that has them, so that each block has one owner.
        self.parent: Branch | None = parent.owner(fork) if parent is not None else None
        self.fork = fork
        self._chain: list[BlockHash] = []

    def owner(self, blocks: int) -> Branch:
        """Return the branch that the last of the first `blocks` blocks belongs to."""
        branch = self
        while blocks <= branch.fork and branch.parent is not None:
            branch = branch.parent
        return branch

    def parts(self, first: int, last: int) -> Iterator[tuple[Branch, int, int]]:
        """Yield the owners of the blocks from `first`, before `last`, with their parts: root first."""
        if first >= last:
            return
        owner = self.owner(last)
        if first < owner.fork and owner.parent is not None:
            yield from owner.parent.parts(first, owner.fork)
        yield owner, max(first, owner.fork), last

    def name(self, position: int) -> int:
        """Return what engines call the block at a position: the same on all of them."""
        return self.owner(position + 1).number << NUMBER_BITS | position

    def tokens(self, first: int, last: int, block_tokens: int) -> bytes:
        """Return the packed tokens of blocks that this branch owns."""
        rest = bytes((block_tokens - 2) * TOKEN_BYTES)
        number = self.number
        return b"".join(
            [struct.pack("=II", number, position) + rest for position in range(first, last)]
        )

    def chain(self, blocks: int, space: BlockSpace) -> list[BlockHash]:
        """Return the router's hashes of the first `blocks` blocks. One space a branch."""
        chain = self._chain
        if len(chain) < blocks:
            size = space.block_size_tokens
            if not chain and self.parent is not None:
                chain += self.parent.chain(self.fork, space)
            parent = chain[-1] if chain else root_hash(space)
            chain += extend_chain(parent, self.tokens(len(chain), blocks, size), size)
        return chain[:blocks]


class Library:
    """Makes branches with numbers of their own."""

    def __init__(self) -> None:
        self._count = 0

    def branch(self, parent: Branch | None = None, fork: int = 0) -> Branch:
        self._count += 1
        return Branch(self._count, parent if fork else None, fork)
