"""What stands around a run of breaching: its noise is kept, its trials are watched.

Nothing here imports breaching: an attacker is handed in, and of its methods those are replaced, on
that one object, that hide from their caller what happened.
"""

import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Messages = list[str]


class CarriedError(BaseException):
    """Takes an exception past breaching's except clauses; ``args[0]`` is the exception."""


class CurrentLabels:
    """The labels of every local step: those that a joint optimisation tries at the moment.

    breaching's objective over several local steps takes labels from the hyper-parameters, so without
    this a joint attack on a delta would not optimise its labels.
    """

    def __init__(self) -> None:
        self.labels: Tensor | None = None

    def __getitem__(self, step: int) -> Tensor | None:
        del step  # the whole batch in every step
        return self.labels


class Curve(list[float]):
    """The list to which breaching appends a trial's loss after every finite iteration."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, loss: float) -> None:
        """Note the loss and tell of it."""
        super().append(loss)
        self._tell(loss)


class Watch:
    """Watches the trials of one of breaching's optimisation attackers.

    - Tells of every iteration, and ends the trials when the time is up, though not before one
      iteration is done. breaching takes a KeyboardInterrupt for the wish to go on with the best
      candidate so far, which is what is wanted there; an interrupt of the user's, and an error of
      ``on_progress``, go past it.
    - A trial without a finite iteration scores infinity: its candidate is the initial noise.
    - Trials that were not run are not scored; breaching leaves zeros for them, the best of scores.
    - A joint attack's labels are those that it found; breaching scores with a random draw.
    - breaching's feature regulariser gets to see the copies of the network that its objective over
      several local steps makes.

    Args:
        attacker: Made by breaching's ``prepare_attack``; it is changed.
        seconds: Time for all trials together, from now on; None for any.
        on_progress: Called with (iterations done, iterations in total, loss).

    Attributes:
        curves: Losses of each trial that was begun.
        chosen: Index of the trial that breaching chose.
    """

    def __init__(self, attacker: Any, *, seconds: float | None, on_progress: Callable[[int, int, float], None]) -> None:
        self.curves: list[Curve] = []
        self.chosen = 0
        self._on_progress = on_progress
        self._iterations = int(attacker.cfg.optim.max_iterations)
        self._total = self._iterations * int(attacker.cfg.restarts.num_trials)
        self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
        self._out_of_time = False
        self._attacker = attacker
        self._theirs = {
            name: self._replace(name, replacement)
            for name, replacement in {
                "_run_trial": self._run_trial,
                "_score_trial": self._score_trial,
                "_compute_objective": self._compute_objective,
                "_select_optimal_reconstruction": self._select,
            }.items()
        }
        attacker.objective.register_forward_pre_hook(self._before_objective)

    @property
    def iterations(self) -> int:
        """Finite iterations of all trials."""
        return sum(map(len, self.curves))

    def _replace(self, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(self._attacker, name)
        setattr(self._attacker, name, replacement)
        return original

    def _tell(self, loss: float) -> None:
        done = (len(self.curves) - 1) * self._iterations + len(self.curves[-1])
        try:
            self._on_progress(done, self._total, loss)
        except BaseException as error:
            raise CarriedError(error) from error

    def _stop_if_late(self) -> None:
        self._out_of_time = time.monotonic() > self._deadline
        if self._out_of_time:
            raise KeyboardInterrupt

    def _run_trial(self, models: Any, shared: Any, labels: Any, stats: Any, trial: int, *rest: Any) -> Any:
        if self.curves:
            self._stop_if_late()
        curve = Curve(self._tell)
        self._last_objective = torch.tensor(0.0)
        self.curves.append(curve)
        stats[f"Trial_{trial}_Val"] = curve
        found = self._theirs["_run_trial"](models, shared, labels, stats, trial, *rest)
        ended_early = len(curve) < self._iterations and not self._out_of_time
        if ended_early and bool(torch.isfinite(self._last_objective).all()):
            raise CarriedError(KeyboardInterrupt())
        if isinstance(found, tuple):
            with torch.no_grad():
                labels.copy_(found[1])
        return found

    def _score_trial(self, *args: Any) -> Any:
        if not self.curves[-1]:
            return float("inf")
        try:
            score = self._theirs["_score_trial"](*args)
        except KeyboardInterrupt as error:
            raise CarriedError(error) from None
        return score.detach() if isinstance(score, Tensor) else score

    def _compute_objective(self, *args: Any) -> Callable[[], Any]:
        closure = self._theirs["_compute_objective"](*args)

        def watched() -> Any:
            objective = closure()
            self._last_objective = objective.detach()
            return objective

        return watched

    def _select(self, candidates: Any, *others: Any) -> Any:
        *labels, scores, stats = others
        if len(candidates) < len(scores) and not self._out_of_time:
            raise CarriedError(KeyboardInterrupt())
        scores = scores[: len(candidates)]
        self.chosen = int(scores.argmin())
        return self._theirs["_select_optimal_reconstruction"](candidates, *labels, scores, stats)

    def _before_objective(self, objective: Any, args: tuple[Any, ...]) -> None:
        if self.curves[-1]:
            self._stop_if_late()
        *_, labels = args
        steps = objective.local_hyperparams
        if steps is None:
            return
        if isinstance(steps["labels"], CurrentLabels):
            steps["labels"].labels = labels
        for regularizer in self._attacker.regularizers:
            for hook in filter(None, getattr(regularizer, "refs", [])):
                hook.__deepcopy__ = functools.partial(_itself, hook)


def _itself(original: Any, memo: Any) -> Any:
    del memo
    return original


class _Keep(logging.Handler):
    def __init__(self, messages: Messages) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.startswith("| It:"):
            self._messages.append(message)


@contextmanager
def listening(library: str) -> Iterator[Messages]:
    """Keep a library off the terminal: yields what it logs or prints meanwhile; its warnings are dropped.

    Its prints are caught by their name in its own modules, because ``sys.stdout`` may belong to a
    progress display that draws from another thread.
    """
    messages: Messages = []
    logger = logging.getLogger(library)
    handler, level, propagate = _Keep(messages), logger.level, logger.propagate
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{library}.")]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for module in modules:
        vars(module)["print"] = lambda *values, **_: messages.append(" ".join(map(str, values)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield messages
    finally:
        for module in modules:
            vars(module).pop("print", None)
        logger.propagate = propagate
        logger.setLevel(level)
        logger.removeHandler(handler)
