"""Medusa heads (2401.10774): trained on what the finished model writes, or taken over from a checkpoint of heads.

Text comes from the model as it will be served, hidden states with it: heads learn to foresee the quantized model, not
the original. They may additionally read the embedding of the token just sampled (as Hydra heads do, 2402.05109).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CalibrationError, CheckpointError, PassError
from optimc.plan import DraftTreeInfo, HeadAccuracy, HeadInfo, HeadsInfo, HeadsReport
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.base import Pass, PassContext, PassResult
from optimc_passes.heads import measure
from optimc_passes.heads.config import HeadsData, MedusaConfig
from optimc_passes.heads.draft_vocab import draft_vocabulary, special_ids
from optimc_passes.heads.gather_text import Gathered, gather
from optimc_passes.heads.heads import DRAFT_VOCAB, SHARED_PROJECTION, Heads, block_bias, block_weight, own_projection
from optimc_passes.heads.positions import Positions
from optimc_passes.heads.root_embedding import root_embedding
from optimc_passes.heads.round_heads import round_heads
from optimc_passes.heads.sample_text import SHORTEST_SAMPLE
from optimc_passes.heads.samples import Samples
from optimc_passes.heads.split import split_samples
from optimc_passes.heads.tree import make_tree
from optimc_passes.heads.work_folder import WorkFolder, work_folder
from optimc_passes.load.digest import file_sha256
from optimc_passes.quantize.layer_report import packed_bytes
from optimc_passes.quantize.linears import LinearWeight, embedding_weight, linear_weights
from optimc_passes.weights import Dense, Quantized, Weight

_MEASURED = 8_000
"""Held-out positions that accuracies are measured on at most."""
_WATCHED = 4_096
"""Those that training looks at now and then."""
_IMPORTED_TOKENS = 20_000
"""Tokens of conversations that imported heads are measured on."""
_DRAFT_OVERHEAD = 0.02
"""What evaluating heads costs beside reading their weights, as a share of a step."""


class Medusa(Pass[MedusaConfig]):
    """Adds heads that guess the tokens after the next one, so that several can be verified in one step."""

    name = "medusa"
    version = 1
    stage = "heads"
    config_type = MedusaConfig

    @property
    def uses_calibration(self) -> bool:
        """Continuations follow calibration text; conversations need none."""
        return self.config.from_ is None and self.config.data.prose_tokens > 0

    @property
    def files_digest(self) -> str | None:
        """SHA-256 over the files of heads that are taken over. Raises CheckpointError if they cannot be read."""
        if self.config.from_ is None:
            return None
        from optimc_passes.heads.import_medusa import files_read

        place = Path(self.config.from_)
        try:
            return derive_key(*([path.name, file_sha256(path)] for path in files_read(place)))
        except OSError as error:
            raise CheckpointError(f"{place}: {error.strerror or error}") from error

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what training holds: both tables in float32, the heads five times over, logits of a batch."""
        config, text = self.config, artifact.checkpoint.config.get_text_config(decoder=True)
        width, vocab = int(text.hidden_size), int(text.vocab_size)
        drafted = vocab if config.draft_vocab == "all" else min(config.draft_vocab, vocab)
        matrices = config.heads * width * width * (config.blocks + config.conditioned)
        if config.projection == "own":
            matrices += config.heads * drafted * width
        batch = 2 * config.batch_tokens * (4 * drafted + (config.heads + 2) * 8 * width)
        return 4 * width * vocab + 6 * drafted * width + 20 * matrices + 2 * batch

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Train heads or read them; round, measure, and make their tree."""
        with work_folder(context) as folder:
            if self.config.from_ is not None:
                return self._import(artifact, context, folder)
            return self._train(artifact, context, folder)

    def _train(self, artifact: Artifact, context: PassContext, folder: WorkFolder) -> PassResult:
        import torch

        from optimc_passes.heads.batches import Segments
        from optimc_passes.heads.trainer import Targets, Trainer, places_of

        config = self.config
        gathered = gather(artifact, context, folder.path, config.data, config.seed)
        samples = gathered.samples
        split = split_samples(samples, config.heldout)
        segments = Segments(samples, split.training, config.heads, config.seed)
        if len(segments) == 0:
            raise CalibrationError(
                f"there is no text to train on: no answer or continuation had {SHORTEST_SAMPLE} tokens; give other "
                "data, or raise limits max_seq_len if that is what ends them"
            )
        table = _embedding(artifact) if config.conditioned else None
        vocabulary = self._vocabulary(artifact, samples.tokens)
        head = _output_head(artifact)
        rows = np.arange(head.shape[0]) if vocabulary is None else vocabulary.astype(np.int64)
        projection = _float32(_rows(head, rows))
        targets = Targets(
            torch.from_numpy(projection),
            None if table is None else torch.from_numpy(table),
            1.0 if table is None else _relative_size(samples, table),
            places_of(vocabulary, head.shape[0]),
        )
        watched = Positions(samples, split.heldout, None, _WATCHED)
        trained = Trainer(config, segments, watched, targets, context.progress).run(
            folder.path if folder.survives else None
        )
        heads = self._assemble(artifact, trained.tensors, vocabulary, head)
        positions = Positions(samples, split.heldout, table, _MEASURED)
        start = time.perf_counter()
        finished, accuracies = self._finish(heads, positions, artifact, gathered, context)
        report = HeadsReport(
            source="trained",
            tokens=_tokens_by_kind(gathered, split.training),
            heldout_tokens=_tokens_by_kind(gathered, split.heldout),
            seconds={
                "sample": gathered.seconds,
                "train": trained.seconds,
                "measure": time.perf_counter() - start,
            },
            epochs=trained.epochs,
            stopped_because=trained.stopped_because,
            resumed_at_step=trained.resumed_at_step,
            history=trained.history,
            accuracies=accuracies,
        )
        return self._result(artifact, finished, report, gathered.decisions)

    def _import(self, artifact: Artifact, context: PassContext, folder: WorkFolder) -> PassResult:
        from optimc_passes.heads.import_medusa import read_medusa

        assert self.config.from_ is not None
        imported = read_medusa(Path(self.config.from_), artifact.checkpoint)
        if self.config.depth > imported.heads.info.num_heads:
            there_are = f"there are {imported.heads.info.num_heads} heads in {self.config.from_}"
            raise PassError(self.name, context.done, f"tree: it is {self.config.depth} deep and {there_are}")
        data = HeadsData(chat_tokens=_IMPORTED_TOKENS, prose_tokens=0)
        decisions: tuple[str, ...] = imported.decisions
        try:
            gathered = gather(artifact, context, folder.path, data, self.config.seed)
        except CalibrationError as error:
            gathered = Gathered.nothing(imported.heads.info.hidden_size)
            decisions = (*decisions, f"the heads were not measured: {error}")
        everything = tuple(range(len(gathered.samples)))
        table = _embedding(artifact) if imported.heads.info.conditioned else None
        positions = Positions(gathered.samples, everything, table, _MEASURED)
        start = time.perf_counter()
        finished, accuracies = self._finish(imported.heads, positions, artifact, gathered, context)
        report = HeadsReport(
            source="imported",
            tokens={},
            heldout_tokens=_tokens_by_kind(gathered, everything),
            seconds={"sample": gathered.seconds, "train": 0.0, "measure": time.perf_counter() - start},
            epochs=0.0,
            stopped_because="the heads were trained elsewhere",
            resumed_at_step=None,
            history=(),
            accuracies=accuracies,
        )
        return self._result(artifact, finished, report, (*decisions, *gathered.decisions))

    def _vocabulary(self, artifact: Artifact, tokens: NDArray[np.int32]) -> NDArray[np.int32] | None:
        vocab_size = artifact.checkpoint.config.get_text_config(decoder=True).vocab_size
        size = vocab_size if self.config.draft_vocab == "all" else self.config.draft_vocab
        return draft_vocabulary(tokens, size, vocab_size, special_ids(artifact.checkpoint))

    def _assemble(
        self,
        artifact: Artifact,
        tensors: dict[str, NDArray[np.float32]],
        vocabulary: NDArray[np.int32] | None,
        output_head: Weight,
    ) -> Heads:
        """Return trained tensors as heads, nothing measured yet."""
        config = self.config
        weights: dict[str, Weight] = {}
        for head in range(config.heads):
            for block in range(config.blocks):
                matrix = tensors["first"][head] if block == 0 else tensors["more"][block - 1, head]
                weights[block_weight(head, block)] = Dense.of(np.ascontiguousarray(matrix))
                weights[block_bias(head, block)] = Dense.of(np.ascontiguousarray(tensors["biases"][block, head]))
            if config.projection == "own":
                weights[own_projection(head)] = Dense.of(np.ascontiguousarray(tensors["own"][head]))
        if vocabulary is not None:
            weights[DRAFT_VOCAB] = Dense.of(vocabulary)
            if config.projection == "shared":
                weights[SHARED_PROJECTION] = _rows(output_head, vocabulary.astype(np.int64))
        info = HeadsInfo(
            num_heads=config.heads,
            hidden_size=output_head.shape[1],
            num_blocks=config.blocks,
            conditioned=config.conditioned,
            projection=config.projection,
            draft_vocab_size=output_head.shape[0] if vocabulary is None else len(vocabulary),
            draft_vocab=None if vocabulary is None else f"heads/{DRAFT_VOCAB}",
            bits=None,
            base_hash=artifact.checkpoint.digest,
            heads=(HeadInfo(confidence=measure.believed()),) * config.heads,
            tree=DraftTreeInfo(nodes=(), source="auto", expected_tokens=None, costs=(), machine=""),
        )
        return Heads(info, weights)

    def _finish(
        self, heads: Heads, positions: Positions, artifact: Artifact, gathered: Gathered, context: PassContext
    ) -> tuple[Heads, tuple[HeadAccuracy, ...]]:
        """Return the heads rounded, with what was measured of them and their tree; and accuracies before and after."""
        output_head = _output_head(artifact)
        shared = heads.info.projection == "shared" and SHARED_PROJECTION not in heads.weights
        matrix = _float32(output_head) if shared else None
        rounded = round_heads(heads, self.config.bits)
        before: tuple[HeadAccuracy, ...] = ()
        after: tuple[HeadAccuracy, ...] = ()
        curves = [measure.believed()] * heads.info.num_heads
        if len(positions) > 0:
            context.progress(0, 2, "measure")
            before = measure.accuracies(measure.guess(heads, positions, matrix), quantized=False)
            context.progress(1, 2, "measure")
            guesses = measure.guess(rounded, positions, matrix)
            after = measure.accuracies(guesses, quantized=True)
            curves = [measure.confidence(guesses, head) for head in range(heads.info.num_heads)]
            context.progress(2, 2, "measure")
        tree = make_tree(
            self.config.tree,
            measure.shares_by_rank(after),
            num_heads=heads.info.num_heads,
            costs=gathered.costs,
            draft_s=_draft_seconds(rounded, artifact, gathered.costs),
            machine=gathered.machine,
        )
        described = tuple(HeadInfo(confidence=curve) for curve in curves)
        info = rounded.info.model_copy(update={"heads": described, "accuracies": after, "tree": tree})
        # Checked once more: copies are not.
        return replace(rounded, info=HeadsInfo.model_validate(info.model_dump())), (*before, *after)

    def _result(self, artifact: Artifact, heads: Heads, report: HeadsReport, decisions: Sequence[str]) -> PassResult:
        tree = heads.info.tree
        metrics: dict[str, float | int | str] = dict(measure.summary(heads.info.accuracies))
        metrics["tree_nodes"] = len(tree.nodes)
        if tree.expected_tokens is not None:
            metrics["tokens_per_step"] = tree.expected_tokens
        used = artifact.calibration.tokens_used if self.uses_calibration and artifact.calibration else None
        return PassResult(
            artifact.evolve(heads=heads),
            metrics,
            (*decisions, *_told(report, self.config.bits)),
            calibration_tokens=used,
            heads=report,
        )


def _told(report: HeadsReport, bits: int) -> list[str]:
    """Say how training ended, and what rounding cost the first head."""
    told = []
    if report.source == "trained":
        told.append(f"training ended after {report.epochs:.1f} epochs: {report.stopped_because}")
    first = [entry for entry in report.accuracies if entry.head == 0 and entry.kind == measure.ALL]
    if len(first) == 2 and bits != 16:
        before, after = first
        told.append(
            f"rounded to {bits} bits, the first head's first guess is right at {after.top[0]:.3f} of {after.tokens:,} "
            f"held-out positions, before rounding at {before.top[0]:.3f}"
        )
    return told


def _tokens_by_kind(gathered: Gathered, chosen: Sequence[int]) -> dict[str, int]:
    samples = gathered.samples
    counts: Counter[str] = Counter()
    for index in chosen:
        rows = samples.rows(index)
        counts[samples.kinds[index]] += rows.stop - rows.start
    return dict(counts)


def _draft_seconds(heads: Heads, artifact: Artifact, costs: dict[int, float]) -> float:
    """Return about what evaluating the heads takes, from what they read beside what a step of one row reads."""
    if 1 not in costs:
        return 0.0
    table = embedding_weight(artifact.checkpoint.config).name
    tied = any(linear.tied_to == table and linear.name not in artifact.weights for linear in _linears(artifact))
    model = sum(_nbytes(weight) for name, weight in artifact.weights.items() if tied or name != table)
    read = sum(_nbytes(weight) for name, weight in heads.weights.items() if name != DRAFT_VOCAB)
    if heads.info.projection == "shared" and SHARED_PROJECTION not in heads.weights:
        read += _nbytes(_output_head(artifact))
    return costs[1] * (read / model + _DRAFT_OVERHEAD)


def _embedding(artifact: Artifact) -> NDArray[np.float32]:
    """Return every token's embedding as the graph looks it up, [V, d]."""
    assert artifact.graph is not None, "heads follow the graph stage"
    vocab_size = artifact.checkpoint.config.get_text_config(decoder=True).vocab_size
    return root_embedding(artifact.graph, np.arange(vocab_size))


def _relative_size(samples: Samples, table: NDArray[np.float32]) -> float:
    """Return how much larger hidden states are than the embeddings of their tokens, in root mean square."""
    rows = np.linspace(0, len(samples.tokens) - 1, min(_WATCHED, len(samples.tokens))).astype(np.int64)
    states = float(np.square(samples.hidden[rows].astype(np.float32)).mean())
    embedded = float(np.square(table[samples.tokens[rows]]).mean())
    return float(np.sqrt(states / embedded)) if embedded > 0 else 1.0


def _linears(artifact: Artifact) -> tuple[LinearWeight, ...]:
    return linear_weights(artifact.checkpoint.config)


def _output_head(artifact: Artifact) -> Weight:
    """Return the weight of the output head [V, d], as it is served."""
    head = next(linear for linear in _linears(artifact) if linear.is_head)
    return artifact.weights[head.name if head.name in artifact.weights else head.source]


def _rows(weight: Weight, rows: NDArray[np.int64]) -> Weight:
    return weight.rows(rows) if isinstance(weight, Quantized) else Dense.of(np.ascontiguousarray(weight.read()[rows]))


def _float32(weight: Weight) -> NDArray[np.float32]:
    return weight.dequantize() if isinstance(weight, Quantized) else weight.read().astype(np.float32)


def _nbytes(weight: Weight) -> int:
    return packed_bytes(weight) if isinstance(weight, Quantized) else weight.nbytes
