"""What must not matter: how a text is cut into chunks, who is in the batch, trees instead of texts, moved rows, graphs.

Tolerances are shares of the largest logit. Products of other shapes are summed in another order, which half numbers
show: a row may differ by about as much as it does from float32, 0.2% in SmolLM2. With an int8 pool a key on the edge
between two codes then takes the other one: 2.6% were seen. CUDA graphs run the very same kernels, and must not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpu.check import Outcome, at_most
from gpu.sequences import Sequences, logits_by_chunks
from optimc_runtime.executor.base import Executor


def check_chunks(executor: Executor, tokens: NDArray[np.int64], most: int, tolerance: float) -> Iterator[Outcome]:
    """Chunks of every kind of call answer what one chunk does."""
    whole = logits_by_chunks(executor, tokens, [most])
    for name, chunks in (("17", [17]), ("16", [16]), ("5", [5]), ("1", [min(most, len(tokens) - 12), 1])):
        found = logits_by_chunks(executor, tokens, chunks, seed=1)
        yield at_most(f"chunks of {name}", _error(found, whole), tolerance, " of the peak")


def check_mates(
    executor: Executor, tokens: NDArray[np.int64], most_seqs: int, vocab: int, tolerance: float
) -> Iterator[Outcome]:
    """A sequence decodes to the same logits alone and among others of other lengths."""
    rng = np.random.default_rng(3)
    half = len(tokens) // 2
    alone, together = Sequences(executor.pool), Sequences(executor.pool, 1)
    executor.execute(alone.step([("a", tokens[:half])], rows=[]))
    mates = [(f"mate {index}", rng.integers(0, vocab, 3 + 7 * index % 20)) for index in range(most_seqs - 1)]
    executor.execute(together.step([("a", tokens[:half])], rows=[]))
    for mate in mates:
        executor.execute(together.step([mate], rows=[]))
    errors = []
    for place, token in enumerate(tokens[half : half + 8]):
        single = np.array([token])
        wanted = executor.execute(alone.step([("a", single)])).logits.copy()
        others = [(name, rng.integers(0, vocab, 1 + (place + index) % 3)) for index, (name, _) in enumerate(mates)]
        count = sum(len(each) for _, each in others)
        found = executor.execute(together.step([*others, ("a", single)], rows=[count])).logits
        errors.append(_error(found, wanted))
    yield at_most(f"beside {len(mates)} mates", max(errors), tolerance, " of the peak")


def check_calls(executor: Executor, tokens: NDArray[np.int64], tolerance: float) -> Iterator[Outcome]:
    """A step of several calls, which are enqueued without waiting, answers what a step for each sequence does."""
    bounds = {"a": (0, 20), "b": (5, 23), "c": (3, 20), "d": (0, 3), "e": (7, 8)}  # three chunks, two short queries
    work = [(name, tokens[first:last]) for name, (first, last) in bounds.items()]
    together = executor.execute(Sequences(executor.pool).step(work)).logits.copy()
    apart = [executor.execute(Sequences(executor.pool, 1).step([each])).logits.copy() for each in work]
    yield at_most("several calls in a step", _error(together, np.concatenate(apart)), tolerance, " of the peak")


def check_trees(executor: Executor, tokens: NDArray[np.int64], tolerance: float) -> Iterator[Outcome]:
    """Nodes of a tree answer what the texts they stand for do, and a node that is moved behind the root is decoded
    upon."""
    prompt, nodes = tokens[:20], tokens[20:25]
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4]]
    mask = np.zeros((5, 5), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    sequences = Sequences(executor.pool)
    executor.execute(sequences.step([("a", prompt)], rows=[]))
    depths = np.array([len(path) - 1 for path in paths])
    step = replace(sequences.step([("a", nodes)]), tree_mask=mask, positions=20 + depths)
    found = executor.execute(step).logits.copy()
    texts = [np.concatenate([prompt, nodes[path]]) for path in paths]
    wanted = np.stack([logits_by_chunks(executor, text, [20, 1], seed=2)[-1] for text in texts])
    yield at_most("a tree of 5 nodes", _error(found, wanted), tolerance, " of the peak")
    executor.move(step.slots[[2, 4]], step.slots[[1, 2]])
    sequences.length["a"] = 23
    after = executor.execute(sequences.step([("a", tokens[30:31])])).logits.copy()
    wanted = logits_by_chunks(executor, np.concatenate([texts[4], tokens[30:31]]), [20, 1], seed=3)[-1:]
    yield at_most("decoding upon moved rows", _error(after, wanted), tolerance, " of the peak")


def check_graphs(load: Callable[[bool], Executor], tokens: NDArray[np.int64], steps: int = 12) -> Iterator[Outcome]:
    """Decode with CUDA graphs and without: not a bit may differ. `load(graphs)` makes an executor."""
    answers, graphs = [], 0
    for with_graphs in (True, False):
        with closing(load(with_graphs)) as executor:
            sequences = Sequences(executor.pool)
            executor.execute(sequences.step([("a", tokens[:20]), ("b", tokens[5:40])], rows=[]))
            found = []
            for place in range(steps):
                work = [(name, tokens[40 + place : 41 + place]) for name in "ab"]
                found.append(executor.execute(sequences.step(work)).logits.copy())
            answers.append(np.stack(found))
            graphs = max(graphs, getattr(executor, "num_graphs", 0))
    differing = int((answers[0] != answers[1]).sum())
    yield Outcome("graphs were captured", graphs > 0, f"{graphs}", ">= 1", {"value": graphs})
    yield at_most("logits that graphs change", differing, 0, largest=float(np.abs(answers[0] - answers[1]).max()))


def _error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
