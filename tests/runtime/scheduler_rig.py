"""The scheduler alone, driven greedily over the scripted executor."""

from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.prefix_cache import PrefixCache, chain_hash
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence


class Rig:
    """Scheduler, executor and argmax; checks the invariants after every step."""

    def __init__(
        self,
        scripted,
        *,
        num_blocks=8,
        block_size=4,
        max_step_tokens=8,
        max_seqs=8,
        max_seq_len=64,
        cache=True,
        block_hash=chain_hash,
        check=True,
        **options,
    ):
        self.limits = StepLimits(max_seq_len, max_step_tokens, max_seqs, block_size, num_blocks)
        limits = scripted.manifest(max_step_tokens=max_step_tokens, max_seqs=max_seqs, max_seq_len=max_seq_len).limits
        self.executor = scripted.Executor(num_blocks, block_size, 64, limits)
        self.pool = BlockPool(num_blocks, block_size)
        scripted.poison_on_allocate(self.pool, self.executor)
        prefix_cache = PrefixCache(self.pool, "engine", block_hash) if cache else None
        self.scheduler = Scheduler(self.limits, self.pool, prefix_cache, **options)
        self.check = check
        self.steps = 0
        self.sequences = []

    def add(self, prompt, count, *, tenant="", priority=0, arrived_s=0.0, **options) -> Sequence:
        order = len(self.sequences)
        options.setdefault("extras", ())
        sequence = Sequence(str(order), order, list(prompt), count, **options)
        sequence.tenant, sequence.priority, sequence.arrived_s = tenant, priority, arrived_s
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self, draft=None, *, execute_s=0.001):
        """Run one step that takes `execute_s`. Trees are chains, and accepted as far as they are right."""
        step = self.scheduler.schedule(draft)
        if step is None:
            return None
        logits = self.executor.execute(step.plan).logits
        self.scheduler.observe(step, execute_s)
        row = 0
        for item in step.work:
            if item.tree is not None:
                self._accept(item, logits[row:])
            row += item.num_logits
        self.scheduler.commit(step)
        row = 0
        for item in step.work:
            sequence = item.sequence
            row += item.num_logits
            is_complete = item.tree is None and sequence.num_computed == sequence.num_tokens
            if is_complete and sequence.wants_token:
                sequence.append(int(logits[row - 1].argmax()))
            if not sequence.wants_token and sequence.num_computed >= sequence.num_tokens - 1:
                self.scheduler.release(sequence)
        self.steps += 1
        if self.check:
            self.scheduler.check_integrity()
        return step

    def _accept(self, item, logits):
        for node in (*item.tree.tokens, None):
            token, logits = int(logits[0].argmax()), logits[1:]
            item.sequence.append(token)
            if token != node:
                return

    def run(self, max_steps=10_000):
        while self.step() is not None:
            assert self.steps < max_steps, "no end in sight"
        self.assert_idle()

    def assert_idle(self):
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.pool.num_available == self.pool.num_blocks - len(self.scheduler.pins)

    def work(self, step) -> dict[str, int]:
        return {item.sequence.request_id: item.num_tokens for item in step.work}
