"""A small engine that shares its KV cache through a Mooncake store. docs/connector.md explains it.

python examples/engine.py
"""

import contextlib

from toy import GROUPS, Model, Pool

import kvmask

HASH_BLOCK = 16  # tokens per digest
TRIES = 2  # loads of a request, when blocks fail


class Engine:
    """Serves requests one after another.

    Args:
        store: A connected store, or None: then the engine has its own cache alone.
        num_blocks: Blocks of each group.
    """

    def __init__(self, store=None, num_blocks=64):
        self.model = Model(num_blocks)
        self.pools = {name: Pool(num_blocks) for name in GROUPS}
        layouts = {
            name: kvmask.KVLayout.from_tensors([tensor], num_blocks=num_blocks)
            for name, tensor in self.model.memory.items()
        }
        self.contract = kvmask.Contract(
            GROUPS,
            HASH_BLOCK,
            kvmask.StrictKeys("examples/engine"),
            kvmask.Hashing(seed="the same in all engines"),
            payload=layouts,
        )
        self.bound = self.contract.bind(layouts)
        self.coordinator = self.contract.coordinator
        # What failed to load is absent for a minute, so a second lookup finds a shorter hit.
        failed = kvmask.AbsenceMemo(60)
        self.kv = store and kvmask.KVTransfer(store, self.bound, failed_loads=failed)

    def serve(self, prompt, num_new):
        """Return the `num_new` tokens that follow a prompt."""
        request = self.contract.request(prompt)
        tables, computed = self.admit(request)
        for _ in range(TRIES if self.kv is not None else 0):
            hit = self.kv.lookup(request, held=computed)
            if hit.length == 0:
                break
            self.make_room(tables, hit)
            loaded = self.kv.load(request, hit, tables)
            self.withhold(loaded, tables)
            computed = max(computed, loaded.usable_tokens)
            if loaded.ok:
                break
        tokens = list(prompt)
        while True:
            following = self.step(tables, computed, tokens)
            computed = len(tokens)
            if self.kv is not None and self.is_due(request, computed):
                self.withhold(self.kv.save(request, tables, computed))
            tokens.append(following)
            if len(tokens) == len(prompt) + num_new:
                self.finish(request, tables, computed)
                return tokens[len(prompt) :]
            request.extend([following])

    def admit(self, request):
        """Block tables with what this engine has of a request, and how many tokens that is."""
        whole = {name: self.digests(request, name) for name in GROUPS}
        present = [[d in self.pools[name].cached for d in whole[name]] for name in GROUPS]
        local = self.coordinator.find_hit(present, request.num_tokens - 1).length
        tables = {}
        for name, needed in zip(GROUPS, self.coordinator.load_mask(local), strict=True):
            # A window needs its last blocks alone. The entries before them stay empty.
            share, digests = self.pools[name].share, whole[name]
            tables[name] = [share(digests[i]) if needed[i] else 0 for i in range(len(needed))]
        return tables, local

    def digests(self, request, name):
        """What the whole blocks of a request are known by: the digest of their last token."""
        step = GROUPS[name].block_size // HASH_BLOCK
        return request.hashes[:][step - 1 :: step]

    def make_room(self, tables, hit):
        """Blocks for what a load fills."""
        for (name, table), needed in zip(tables.items(), hit.masks, strict=True):
            table.extend([0] * (len(needed) - len(table)))
            for i in needed.indices():
                table[i] = table[i] or self.pools[name].new()

    def withhold(self, result, tables=None):
        """Never use blocks again that the store may still read or write (docs/late-bytes.md)."""
        for name, blocks in result.quarantined.items():
            for block in blocks:
                self.pools[name].keep(block)
            if tables is not None:
                tables[name][:] = [0 if block in blocks else block for block in tables[name]]

    def step(self, tables, computed, tokens):
        """Compute all tokens from `computed` on, and return the one that follows."""
        for name, table in tables.items():
            size = GROUPS[name].block_size
            table.extend([0] * (-(-len(tokens) // size) - len(table)))
            for i in range(computed // size, len(table)):
                table[i] = table[i] or self.pools[name].new()
        for position in range(computed, len(tokens)):
            following = self.model.compute(tables, position, tokens[position])
        return following

    def is_due(self, request, computed):
        """Whether there is something new to save."""
        return computed - request.mark >= self.coordinator.alignment

    def finish(self, request, tables, computed):
        """Leave the whole blocks of a request behind, for requests that begin alike."""
        for name, table in tables.items():
            digests = self.digests(request, name)
            whole = computed // GROUPS[name].block_size
            for i, block in enumerate(table):
                if block:
                    self.pools[name].drop(block, digests[i] if i < whole else None)


PROMPTS = (range(200), [*range(150), 7, 8, 9], range(500, 560))


def main():
    alone = Engine()
    expected = [alone.serve(prompt, 40) for prompt in PROMPTS]
    with kvmask.mooncake.local_master() as master, contextlib.ExitStack() as stack:
        for name in ("first", "second"):
            store = stack.enter_context(contextlib.closing(kvmask.mooncake.connect(master)))
            engine = Engine(store)
            stack.enter_context(engine.kv)
            assert [engine.serve(prompt, 40) for prompt in PROMPTS] == expected
            loaded = engine.kv.stats.loaded_keys
            print(f"{name} engine: {engine.model.computed} tokens computed, {loaded} blocks loaded")


if __name__ == "__main__":
    main()
