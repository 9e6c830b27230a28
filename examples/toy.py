"""What an engine has without kvmask: a model, the memory of its KV cache, and a pool of blocks."""

import numpy as np

from kvmask import FullAttention, SlidingWindow

GROUPS = {"full": FullAttention(32), "swa": SlidingWindow(16, window=32)}


class Model:
    """One layer attends to the whole prefix, one to a window.

    What a token leaves in the cache depends on all that its layer attends to, and that is read from
    the cache. So a wrong block changes the tokens that follow.
    """

    def __init__(self, num_blocks):
        self.memory = {n: np.zeros((num_blocks, g.block_size), np.int64) for n, g in GROUPS.items()}
        self.computed = 0  # tokens

    def compute(self, tables, position, token):
        """Fill the entries of one token, and return the token that follows it."""
        value = token
        for name, group in GROUPS.items():
            memory, table, size = self.memory[name], tables[name], group.block_size
            first = 0 if name == "full" else max(position - group.window + 1, 0)
            seen = sum(int(memory[table[i // size], i % size]) for i in range(first, position))
            value = (value * 1_103_515_245 + seen + 12_345) % (1 << 31)
            memory[table[position // size], position % size] = value
        self.computed += 1
        return value % 50_000


class Pool:
    """The blocks of one group. Requests leave theirs behind, under the digests of their tokens."""

    def __init__(self, num_blocks):
        self.free = list(range(num_blocks - 1, 0, -1))  # block 0 stands for "no block"
        self.users = [0] * num_blocks
        self.cached = {}  # digest: block, the oldest first

    def new(self):
        """A block whose content nobody needs."""
        if not self.free:
            oldest = next(d for d, block in self.cached.items() if not self.users[block])
            self.free.append(self.cached.pop(oldest))
        block = self.free.pop()
        self.users[block] = 1
        return block

    def share(self, digest):
        """The block that holds these tokens already."""
        block = self.cached[digest]
        self.users[block] += 1
        return block

    def keep(self, block):
        """Never give this block to anybody again."""
        self.users[block] += 1

    def drop(self, block, digest=None):
        """A request is done with a block. A whole one, with a digest, stays until it is needed."""
        self.users[block] -= 1
        if digest is not None:
            self.cached.setdefault(digest, block)
        if not self.users[block] and block not in self.cached.values():
            self.free.append(block)
