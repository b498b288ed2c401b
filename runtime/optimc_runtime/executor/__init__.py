"""Executors: what runs a step on a target, behind one small interface."""

from optimc_runtime.executor.base import DraftCandidates, Executor, KvPoolInfo, StepPlan, StepResult

__all__ = ["DraftCandidates", "Executor", "KvPoolInfo", "StepPlan", "StepResult"]
