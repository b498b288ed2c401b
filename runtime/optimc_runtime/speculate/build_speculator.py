"""From options to a speculator: which proposers a plan, or two, can have."""

from __future__ import annotations

from typing import NamedTuple

from optimc.errors import ConfigError, Fault
from optimc.plan import Manifest, Plan
from optimc.plan.tensor_names import TOKENIZER
from optimc_runtime.config import EngineConfig, SpeculationOptions, StepLimits
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.load import load_executor
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.speculate.draft_engine import DraftEngine
from optimc_runtime.speculate.medusa import MedusaProposer
from optimc_runtime.speculate.ngram import NgramProposer
from optimc_runtime.speculate.proposal import Proposer
from optimc_runtime.speculate.speculator import ProposingSpeculator


class DraftModel(NamedTuple):
    """Another plan, ready to draft."""

    executor: Executor
    limits: StepLimits


def build_speculator(
    executor: Executor, manifest: Manifest, options: SpeculationOptions, draft: DraftModel | None = None
) -> ProposingSpeculator | None:
    """Return what the options ask for, None if that is nothing. `draft` becomes the speculator's to close; a mode that
    needs one gets it from `load_draft`.

    Raises ConfigError if the plan has no heads and they are asked for.
    """
    if options.mode == "off":
        return None
    proposers: list[Proposer] = []
    if options.mode in ("ngram", "auto"):
        proposers.append(NgramProposer(options.ngram_min, options.ngram_max))
    heads = executor.heads
    if options.mode == "medusa" and heads is None:
        reason = f"plan '{manifest.name}' has no Medusa heads; build it with a medusa pass, or use auto, ngram or off"
        raise ConfigError("speculation", [Fault("mode", reason)])
    if options.mode in ("medusa", "auto") and heads is not None:
        proposers.append(MedusaProposer(executor, heads, options.max_nodes))
    if options.mode == "draft":
        if draft is None:
            raise ConfigError("speculation", [Fault("draft_plan", "is loaded by Engine.load, not by Engine")])
        proposers.append(DraftEngine(draft.executor, draft.limits))
    return ProposingSpeculator(options, proposers, CostModel(heads.tree.costs if heads is not None else ()))


def load_draft(plan: Plan, config: EngineConfig, *, trust: bool) -> DraftModel | None:
    """Load the plan that is to draft for `plan`; None if the options name none.

    Raises PlanError if it cannot be used here, ConfigError if it speaks another language of tokens.
    """
    path = config.speculation.draft_plan
    if path is None:
        return None
    draft = Plan.open(path, verify=not trust)
    mine, its = plan.manifest.model.vocab_size, draft.manifest.model.vocab_size
    if mine != its:
        reason = f"{path} has a vocabulary of {its:,}, {plan.path} one of {mine:,}; a draft needs the same tokens"
        raise ConfigError("speculation", [Fault("draft_plan", reason)])
    if _tokenizer_of(plan) != _tokenizer_of(draft):
        reason = f"{path} and {plan.path} have different tokenizers; a draft needs the same tokens"
        raise ConfigError("speculation", [Fault("draft_plan", reason)])
    executor = load_executor(draft, threads=config.threads)
    try:
        return DraftModel(executor, EngineConfig().resolve(draft.manifest, executor.pool))
    except BaseException:
        executor.close()
        raise


def _tokenizer_of(plan: Plan) -> bytes:
    return plan.blob(TOKENIZER) if TOKENIZER in plan else b""
