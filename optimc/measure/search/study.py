"""The search itself: a sampler proposes points, trials answer, nothing is measured twice, a killed study goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optimc.errors import MeasureError, MissingExtraError
from optimc.measure.search.search_result import Trial
from optimc.measure.search.space import Parameters, Space, point_key
from optimc.progress import Progress, no_progress
from optimc.storage import storing
from optimc.wording import one_line

if TYPE_CHECKING:
    import optuna

MOST_REPEATS = 20
"""Proposals of known points in a row after which the first unknown point is taken: a sampler that has made up its mind
must not use up the trials."""
_STARTUP = 10
"""Points drawn at random before TPE models anything."""


class Sampler(Protocol):
    """What proposes points and remembers trials."""

    def earlier(self) -> tuple[Trial, ...]:
        """Return the trials of this and earlier runs of the study, in order."""
        ...

    def ask(self, parameters: Parameters | None = None) -> Parameters:
        """Return the next point to try: `parameters` if they are given."""
        ...

    def tell(self, trial: Trial, *, repeated: bool = False) -> None:
        """Take in the answer to the last `ask`; `repeated`: it is one of the earlier trials."""
        ...


def search(
    space: Space,
    sampler: Sampler,
    run: Callable[[Parameters], Trial],
    *,
    trials: int,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = no_progress,
) -> tuple[Trial, ...]:
    """Try points until `trials` of them are known, all of them, or `budget_s` seconds are over; return them in order.

    Trials of earlier runs count. A point that is proposed again is answered from what is known.
    """
    start = clock()
    known = {point_key(trial.parameters): trial for trial in sampler.earlier()}
    wanted = min(trials, space.size)
    repeats = 0
    while len(known) < wanted and (budget_s is None or clock() - start < budget_s):
        progress(len(known), wanted, "search")
        asked = None
        if repeats >= MOST_REPEATS:
            asked = next(point for point in space.points() if point_key(point) not in known)
        parameters = sampler.ask(asked)
        seen = known.get(point_key(parameters))
        if seen is not None:
            repeats += 1
            sampler.tell(seen, repeated=True)
            continue
        repeats = 0
        trial = run(parameters)
        known[point_key(parameters)] = trial
        sampler.tell(trial)
    progress(len(known), wanted, "search")
    return tuple(known.values())


class OptunaSampler:
    """TPE over categories, its trials in a journal file. Gates are its constraints: points that miss them by less are
    nearer to being good. Raises MissingExtraError without optuna."""

    def __init__(self, space: Space, journal: Path, *, seed: int = 0, fresh: bool = False) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingExtraError("optuna", "search", "searching recipes") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with storing("the search", journal):
            journal.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                journal.unlink(missing_ok=True)
        self._optuna = optuna
        self._space = space
        backend = optuna.storages.journal.JournalFileBackend(
            str(journal), lock_obj=optuna.storages.journal.JournalFileOpenLock(str(journal))
        )
        self._journal = journal
        try:
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="search",
                direction="maximize" if space.maximised else "minimize",
                load_if_exists=True,
            )
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise _damaged(journal, error) from error
        # A resumed study would otherwise draw the numbers of its first run again.
        seed += len(self._study.trials)
        self._study.sampler = optuna.samplers.TPESampler(
            seed=seed,
            multivariate=True,
            n_startup_trials=min(_STARTUP, max(1, space.size // 3)),
        )
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            path: optuna.distributions.CategoricalDistribution(list(values)) for path, values in space.choices.items()
        }
        self._asked: optuna.trial.Trial | None = None

    def earlier(self) -> tuple[Trial, ...]:
        """Return what the journal has; a trial that was under way when its run died has left nothing."""
        kept = [trial.user_attrs.get("trial") for trial in self._study.get_trials(deepcopy=False)]
        try:
            return tuple(Trial.from_json(data) for data in kept if data is not None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _damaged(self._journal, error) from error

    def ask(self, parameters: Parameters | None = None) -> Parameters:
        """Return the next point."""
        if parameters is not None:
            self._study.enqueue_trial(dict(parameters))
        self._asked = self._study.ask(self._distributions)
        return {path: self._asked.params[path] for path in self._space.choices}

    def tell(self, trial: Trial, *, repeated: bool = False) -> None:
        """Take in the answer. The journal holds each trial whole, but only once."""
        assert self._asked is not None, "ask comes first"
        states = self._optuna.trial.TrialState
        self._asked.set_constraint("gates", trial.violation)
        if not repeated:
            self._asked.set_user_attr("trial", trial.to_json())
        if trial.state == "measured":
            self._study.tell(self._asked, trial.objective)
        else:
            self._study.tell(self._asked, state=states.PRUNED if trial.state == "gate" else states.FAIL)
        self._asked = None


def _damaged(journal: Path, error: Exception) -> MeasureError:
    reason = f"{type(error).__name__}: {one_line(error)}"
    return MeasureError(f"{journal}: not a search's journal ({reason}); delete it, or start with --fresh")


def journal_path(cache: Path, space: Space, recipe_digest: str, measured: Mapping[str, Any]) -> Path:
    """Return where the study of a recipe, a space and a way of measuring is kept."""
    text = json.dumps([recipe_digest, space.digest, dict(measured)], sort_keys=True)
    return cache / "search" / f"{hashlib.sha256(text.encode()).hexdigest()}.log"
