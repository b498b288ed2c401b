"""What there is to measure: each factor's comparisons and their loads; and why a factor has none."""

from __future__ import annotations

from dataclasses import dataclass

from optimc.errors import ConfigError, Fault
from optimc.measure.attribution.attribution import Row, RowMode
from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.factors import HEADS, Factor, heads_speculation
from optimc.measure.attribution.loads import FactorLoads, load_name, loads_of
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.attribution.variants import Step, cumulative, everything, leave_one_out
from optimc.measure.store import EngineSwitches
from optimc.measure.workload import Workload
from optimc.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Job:
    """One comparison under one load."""

    mode: RowMode
    step: Step
    workload: Workload
    note: str

    @property
    def name(self) -> str:
        """The factor, and what it is compared with."""
        return f"{self.step.factor} ({self.mode})"

    @property
    def load(self) -> str:
        """The load in a few words."""
        return load_name(self.workload)

    def unmeasured(self, reason: str) -> Row:
        """Return the row of a comparison without figures."""
        return Row(self.step.factor, self.step.kind, self.mode, self.load, na=reason, note=self.note)


def check_feasible(recipe: Recipe, config: AttributeConfig, *, has_quality: bool) -> None:
    """Raise ConfigError, before any build, for lengths beyond what the recipe says and heads that it has not."""
    most = recipe.limits.max_seq_len
    asked = {"prompt and output tokens": config.prompt_tokens + config.output_tokens}
    if config.windows and has_quality:
        asked["--length"] = config.length
    faults = [
        Fault(what, f"{tokens} tokens exceed the recipe's limits.max_seq_len {most}; ask for fewer")
        for what, tokens in asked.items()
        if most is not None and tokens > most
    ]
    if config.speculation == HEADS and heads_speculation(recipe) != HEADS:
        faults.append(Fault("--speculation", f"{HEADS} needs heads, and no pass of the recipe makes any; try ngram"))
    if faults:
        raise ConfigError("attribution options", faults)


def find_jobs(
    file: RecipeFile, factors: tuple[Factor, ...], config: AttributeConfig, switches: EngineSwitches
) -> tuple[list[Job], list[Row]]:
    """Return what is to be measured, and a row for each factor that cannot be, with the reason.

    Raises ConfigError if nothing can be.
    """
    modes: list[RowMode] = ["without"] if config.mode != "cumulative" else []
    modes += ["cumulative"] if config.mode != "leave-one-out" else []
    loads = {factor.name: loads_of(factor.name, config, file.recipe.limits) for factor in factors}
    usable: list[Factor] = []
    rows: list[Row] = []
    for factor in factors:
        reason = factor.na or loads[factor.name].na
        if reason is None:
            usable.append(factor)
        else:
            rows += [Row(factor.name, factor.kind, mode, "", na=reason) for mode in modes]
    if not usable:
        reasons = "; ".join(dict.fromkeys(f"{row.factor}: {row.na}" for row in rows))
        raise ConfigError(file.recipe.name, [Fault("passes", f"nothing can be switched off alone ({reasons})")])
    steps: list[tuple[RowMode, Step]] = []
    if "without" in modes:
        steps += [("without", step) for step in leave_one_out(file, usable, switches)]
        if len(usable) > 1:
            steps.append(("without", everything(file, usable, switches)))
    if "cumulative" in modes:
        steps += [("cumulative", step) for step in cumulative(file, usable, switches)]
    loads["all"] = FactorLoads(config.workloads())
    jobs = [
        Job(mode, step, workload, "; ".join(filter(None, (step.note, loads[step.factor].note))))
        for mode, step in steps
        for workload in loads[step.factor].workloads
    ]
    return jobs, rows
