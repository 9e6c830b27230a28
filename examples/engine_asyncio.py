"""The engine of engine.py with asyncio: many requests at a time, and no call blocks the others.

python examples/engine_asyncio.py
"""

import asyncio
import contextlib

from engine import PROMPTS, TRIES, Engine

import kvmask


class AsyncEngine(Engine):
    """Serves requests beside each other. Its plans are driven by hand."""

    async def run(self, plan):
        """Drive a plan. The store's calls block, so each runs in a thread."""
        while (call := plan.next_call()) is not None:
            try:
                answer = await asyncio.to_thread(call.run, self.kv.store)
            except BaseException as error:
                plan.fail(error)
            else:
                plan.feed(answer)
        return plan.result

    async def serve(self, prompt, num_new):
        """Return the `num_new` tokens that follow a prompt."""
        tools = self.kv.tools  # hints, memos, counters: they work inside the plans
        request = self.contract.request(prompt)
        tables, computed = self.admit(request)
        for _ in range(TRIES):
            hit = await self.run(request.lookup_plan(held=computed, tools=tools))
            if hit.length == 0:
                break
            self.make_room(tables, hit)
            plan = request.load_plan(self.bound, hit, tables, tools=tools)
            loaded = request.loaded(await self.run(plan))
            self.withhold(loaded, tables)
            computed = max(computed, loaded.usable_tokens)
            if loaded.ok:
                break
        tokens = list(prompt)
        while True:
            following = self.step(tables, computed, tokens)
            computed = len(tokens)
            if self.is_due(request, computed):
                plan = request.save_plan(self.bound, tables, computed, tools=tools)
                self.withhold(request.saved(await self.run(plan)))
            tokens.append(following)
            if len(tokens) == len(prompt) + num_new:
                self.finish(request, tables, computed)
                return tokens[len(prompt) :]
            request.extend([following])
            await asyncio.sleep(0)  # let the others compute, too


async def main():
    alone = Engine()
    expected = [alone.serve(prompt, 40) for prompt in PROMPTS]
    with kvmask.mooncake.local_master() as master, contextlib.ExitStack() as stack:
        for name in ("first", "second"):
            store = stack.enter_context(contextlib.closing(kvmask.mooncake.connect(master)))
            engine = AsyncEngine(store)
            stack.enter_context(engine.kv)
            served = await asyncio.gather(*(engine.serve(prompt, 40) for prompt in PROMPTS))
            assert served == expected
            loaded = engine.kv.stats.loaded_keys
            print(f"{name} engine: {engine.model.computed} tokens computed, {loaded} blocks loaded")


if __name__ == "__main__":
    asyncio.run(main())
