"""Native kernels of the optimc runtime. Arrays must have exactly the dtype given, in C order; nothing is converted.

Wrong dtypes raise TypeError, wrong shapes, ids or parameter ranges ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STATUS_OK: int
STATUS_NAN: int
STATUS_EMPTY: int

class RowState:
    """One sequence's side of sampling, kept from step to step: parameters, output position, tokens seen."""

    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        num_logprobs: int = -1,
        bias_ids: NDArray[np.int32],
        bias_values: NDArray[np.float32],
        stop_ids: NDArray[np.int32],
        min_tokens: int = 0,
    ) -> None:
        """Temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 keep all, num_logprobs -1 reports none.

        `bias_values` [n] are added to the logits of `bias_ids` [n]; `stop_ids` may not be chosen at output positions
        below `min_tokens`.
        """

    def remember(self, prompt: NDArray[np.int32]) -> None:
        """From now on keep track of tokens for the penalties; those of the prompt are seen, but not in the output."""

    def accept(self, token: int) -> None:
        """Record that `token` was emitted at the current position."""

    @property
    def position(self) -> int:
        """Output tokens accepted so far."""

    @property
    def seen_ids(self) -> NDArray[np.int32]:
        """Distinct tokens remembered."""

    @property
    def seen_counts(self) -> NDArray[np.int32]:
        """How often each of `seen_ids` stands in the output."""

def sample_rows(
    logits: NDArray[np.float32], states: list[RowState]
) -> tuple[list[int], list[tuple[float, list[tuple[int, float]]] | None], tuple[int, int] | None]:
    """Choose a token per row of `logits` [R, V], which is only read, as are `states` [R]. Large steps release the GIL.

    Returns (token ids [R], logprobs, failure). `logprobs` is empty if no state asks for any, else it holds per row None
    or (logprob of the chosen token, [(token id, logprob) of the likeliest]). `failure` is None, or (row, status) of the
    first row that leaves nothing to choose; then the rest means nothing.
    """

def sample_trees(
    logits: NDArray[np.float32],
    states: list[RowState],
    first_rows: list[int],
    counts: list[int],
    parents: NDArray[np.int32],
    tokens: NDArray[np.int64],
    epsilon: float = 0,
    delta: float = 0,
) -> tuple[
    list[list[int]], list[list[int]], list[int], list[list[tuple[float, list[tuple[int, float]]] | None]], list[int]
]:
    """Choose tokens along a path of every sequence's tree; see `sampler.sample_trees`. `states` accept what is emitted.

    Returns (emitted token ids, queries entered, last rows, logprobs, statuses), each per sequence. `logprobs` is empty
    if no state asks for any. A status other than STATUS_OK is that of the row at which the walk ended early.
    """

def top_rows(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and log-probabilities [M, count] of the likeliest candidates of each row of `logits` [M, V'],
    likeliest first, equal ones by id. A row with a NaN, or without a finite largest logit, has log-probabilities of
    -inf.
    """

def row_max(row: NDArray[np.float32]) -> tuple[float, int, bool]:
    """Return (largest value, its lowest index, whether there is a NaN)."""

def row_max_reference(row: NDArray[np.float32]) -> tuple[float, int, bool]:
    """Scalar reference of row_max."""

def softmax_weights(row: NDArray[np.float32], max: float, temperature: float) -> NDArray[np.float32]:
    """Return exp(-(max - row) / temperature)."""

def softmax_weights_reference(row: NDArray[np.float32], max: float, temperature: float) -> NDArray[np.float32]:
    """Scalar reference of softmax_weights."""

def log_sum_exp(row: NDArray[np.float32], max: float) -> float:
    """Return log(sum(exp(row - max)))."""

def log_sum_exp_reference(row: NDArray[np.float32], max: float) -> float:
    """Scalar reference of log_sum_exp."""

def cutoff_by_count(row: NDArray[np.float32], max: float, count: int) -> tuple[float, int]:
    """Return (distance from max, id) of the last of the `count` nearest tokens, equal ones ordered by id."""

def cutoff_by_count_reference(row: NDArray[np.float32], max: float, count: int) -> tuple[float, int]:
    """Sorting reference of cutoff_by_count."""

def cutoff_by_mass(
    row: NDArray[np.float32], weights: NDArray[np.float32], max: float, temperature: float, share: float
) -> tuple[float, int]:
    """Return (distance, id) of the last of the nearest tokens whose weights reach `share` of the sum."""

def cutoff_by_mass_reference(
    row: NDArray[np.float32], weights: NDArray[np.float32], max: float, share: float
) -> tuple[float, int]:
    """Sorting reference of cutoff_by_mass."""

def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """Return the index whose share of the running sum contains `uniform`."""

def draw_reference(weights: NDArray[np.float32], uniform: float) -> int:
    """Scalar reference of draw."""

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return the Philox4x32-10 block of a counter [4] under a key [2], 32-bit words."""

def uniform_at(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the draw at an output position."""

def supported_instruction_sets() -> list[str]:
    """Return the instruction sets this machine can run, slowest first: "portable", "avx2", "avx512"."""

def default_instruction_set() -> str:
    """Return the set OPTIMC_ISA names, else the fastest.

    Raises ValueError for an unknown set or one this machine lacks.
    """

def probe_read(words: NDArray[np.uint64], threads: int, rounds: int) -> float:
    """Return the bytes per second that all threads read together, each its own part of `words` [n], in the best round.

    Small parts are read again and again within a round. Like the other probes it uses the set OPTIMC_ISA names, else
    the fastest.
    """

def probe_int8_ops(threads: int, seconds: float) -> float:
    """Return the 8-bit multiplications and additions per second, each counted, that all threads do at best."""

def probe_float_ops(threads: int, seconds: float) -> float:
    """Return the same for float32."""

_KvLayer = tuple[int, int, str, str]
"""KV heads, head dim, dtype, and whose scales quantized keys have: "token" or "channel"."""

def kv_block_bytes(*, layers: list[_KvLayer], block_size: int) -> int:
    """Return the bytes of one KV block over all layers, scales included."""

_View = tuple[int, int, int]
"""Buffer, first column, number of columns."""

class ProgramBuilder:
    """Puts a cpu program together; see `optimc.plan.cpu_program`. Every method raises ValueError for what does not fit.

    Weights and buffers are numbered as they are added; operations name them by number and run in the order added.
    """

    def __init__(
        self,
        *,
        layers: list[_KvLayer],
        block_size: int,
        num_blocks: int,
        capacity: int,
        arena_bytes: int,
    ) -> None: ...
    def kv_channel_scales(self, layer: int, scales: NDArray[np.float32], minimums: NDArray[np.float32] | None) -> None:
        """Give a layer with keys "channel" its scales [Hkv, D], for int4 minimums too, before its attention is added.

        A key reads back as code * scale + minimum and saturates; nothing is copied.
        """

    def int_weight(
        self,
        data: NDArray[np.uint8],
        *,
        outputs: int,
        features: int,
        group: int,
        bits: int,
        zeros: bool,
        wide_scales: bool,
        zero_point: int,
    ) -> int: ...
    def float_weight(self, data: NDArray[np.uint8], *, outputs: int, features: int, dtype: str) -> int: ...
    def table(self, data: NDArray[np.uint8], *, rows: int, features: int, dtype: str) -> int: ...
    def vector(self, data: NDArray[np.float32]) -> int: ...
    def permutation(self, data: NDArray[np.int32]) -> int: ...
    def float_buffer(self, rows: str, width: int, offset: int) -> int: ...
    def quantized_buffer(self, rows: str, features: int, group: int, terms: int, offset: int) -> int: ...
    def embed(self, table: int, scale: float, out: _View) -> None: ...
    def norm(
        self,
        x: _View,
        *,
        weight: int,
        bias: int | None,
        epsilon: float,
        heads: int,
        centred: bool,
        before: _View | None,
        after: _View | None,
        sum: _View | None,
        out: _View | None,
        quantized: int | None,
        permutation: int | None,
        quantized_scale: float | None = None,
    ) -> None: ...
    def quantize(self, x: _View, *, quantized: int, permutation: int | None, scale: float | None = None) -> None: ...
    def linear(
        self,
        *,
        x: _View | None,
        quantized: int | None,
        weight: int,
        bias: int | None,
        residual: _View | None,
        gate: str,
        out: _View,
    ) -> None: ...
    def rotation(self, frequencies: int, scale: float, out: _View) -> None: ...
    def attention(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        interleaved: bool,
        logits_rows_only: bool,
        rotation: _View | None,
        q: _View,
        k: _View,
        v: _View,
        out: _View,
    ) -> None: ...
    def elementwise(
        self,
        *,
        steps: list[tuple[str, int, int, float]],
        inputs: list[_View],
        vectors: list[int],
        out: _View,
    ) -> None: ...
    def gather_rows(self, x: _View, out: _View) -> None: ...
    def permute(self, x: _View, *, permutation: int, out: _View) -> None: ...
    def begin_heads(self, *, inputs: list[_View], logits: int, count: int) -> None:
        """Let operations added from here on be the heads', `count` of them: hidden states are copied to each of
        `inputs` before they run, and they leave their answers in the buffer `logits`."""

    def finish(self, logits: int, *, hidden: _View | None = None, threads: int, instruction_set: str) -> Program: ...

class Program:
    """A program ready to run. Not thread-safe."""

    @property
    def threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...
    def execute(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        query_start: NDArray[np.int32],
        context_len: NDArray[np.int32],
        block_table: NDArray[np.int32],
        logits_rows: NDArray[np.int64],
        tree_mask: NDArray[np.bool_] | None,
    ) -> NDArray[np.float32]:
        """Run one step; the arrays are those of StepPlan. The logits [R, V] are overwritten by the next step. The GIL
        is released.

        Raises ValueError if an array reaches outside the program, the pool or the vocabulary.
        """

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy K/V rows [n] between slots, as if all were read before any is written. The GIL is released.

        Raises ValueError if a slot is not in the pool.
        """

    def hidden(self) -> NDArray[np.float32]:
        """Return what the last step's output head multiplied, [R, d]. The next step overwrites it.

        Raises ValueError if the program was built without `hidden`.
        """

    def draft(
        self,
        hidden: NDArray[np.float32],
        tokens: NDArray[np.int64],
        top: int,
        token_ids: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and log-probabilities [N, K, top] of the heads' candidates for hidden states [N, d] and root
        tokens [N]. Ids are places in the draft vocabulary, or what stands there in `token_ids` [V']. The GIL is
        released.

        Raises ValueError if there are no heads, or for arrays that do not fit them.
        """

    def populate_pool(self) -> None:
        """Begin to have the system provide the pool's memory, on a thread of its own; ends with `close`."""

    @property
    def is_pool_populated(self) -> bool:
        """Whether `populate_pool` was called and all memory is there."""

    def slot_bytes(self, slot: int) -> bytes:
        """Return what a slot of the pool holds in every layer: keys, values and their scales."""

    def close(self) -> None:
        """Release threads, pool and weights. Logits that were returned stay readable."""
