"""A run of breaching under observation: its messages are kept, its trials are watched.

Nothing here imports breaching: an attacker is handed in, and of its methods those are replaced, on
that one object, that hide from their caller what happened.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedmjp.attacks.base import Progress


class CarriedError(BaseException):
    """An exception on its way past breaching's except clauses; ``args[0]`` is the exception."""


class _Curve(list[float]):
    """The list to which breaching appends a trial's loss after every finite iteration."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, loss: float) -> None:
        super().append(loss)
        self._tell(loss)


class Watch:
    """An observer of the trials of one of breaching's optimisation attackers.

    - It reports every iteration, and ends the trials when the time is up, though not before one
      iteration is done. breaching takes a KeyboardInterrupt for the wish to go on with the best
      candidate so far, which is what is wanted there; an interrupt of the user's, and an error of
      ``on_progress``, go past it.
    - A trial without a finite iteration scores infinity: its candidate is the initial noise.
    - Trials that were not run are not scored; breaching leaves zeros for them, the best of scores.
    - A joint attack's labels are those that it found; breaching scores with a random draw.
    - breaching's objective over several local steps takes labels from the hyper-parameters: they are
      those that are tried at the moment. Its feature regulariser gets to see the copies of the network
      that this objective makes.

    Args:
        attacker: Made by breaching's ``prepare_attack``; it is changed.
        messages: The lines that breaching prints meanwhile.
        seconds: For all trials together, from now on; None for any.
        on_progress: Called after every iteration.
    """

    def __init__(self, attacker: Any, messages: Sequence[str], *, seconds: float | None, on_progress: Progress) -> None:
        self._curves: list[_Curve] = []  # of each trial that was begun
        self._chosen = 0
        self._attacker, self._messages, self._on_progress = attacker, messages, on_progress
        self._iterations = int(attacker.cfg.optim.max_iterations)
        self._total = self._iterations * int(attacker.cfg.restarts.num_trials)
        self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
        self._stops = 0
        replaced = ("_run_trial", "_score_trial", "_select_optimal_reconstruction")
        self._theirs: dict[str, Callable[..., Any]] = {name: getattr(attacker, name) for name in replaced}
        for name in replaced:
            setattr(attacker, name, getattr(self, name))
        attacker.objective.register_forward_pre_hook(self._before_objective)

    @property
    def diagnostics(self) -> dict[str, float]:
        """Return the least loss of the trial that breaching chose, and the numbers of iterations and trials."""
        loss, iterations = min(self._curves[self._chosen]), sum(map(len, self._curves))
        return {"loss": loss, "iterations": iterations, "trials": len(self._curves)}

    def _tell(self, loss: float) -> None:
        finished = (len(self._curves) - 1) * self._iterations + len(self._curves[-1])
        try:
            self._on_progress(finished, self._total, loss)
        except BaseException as error:
            raise CarriedError(error) from error

    def _stop_if_late(self) -> None:
        if time.monotonic() > self._deadline:
            self._stops += 1
            raise KeyboardInterrupt

    def _pass_interrupts_on(self) -> None:
        """Raise the user's interrupt: breaching prints a line for each, and ours are counted in ``_stops``."""
        if sum("manually" in message for message in self._messages) > self._stops:
            raise CarriedError(KeyboardInterrupt())

    def _run_trial(self, models: Any, shared: Any, labels: Any, stats: Any, trial: int, *rest: Any) -> Any:
        if self._curves:
            self._stop_if_late()
        self._curves.append(_Curve(self._tell))
        stats[f"Trial_{trial}_Val"] = self._curves[-1]
        result = self._theirs["_run_trial"](models, shared, labels, stats, trial, *rest)
        self._pass_interrupts_on()
        if isinstance(result, tuple):
            with torch.no_grad():
                labels.copy_(result[1])
        return result

    def _score_trial(self, *args: Any) -> Any:
        score = self._theirs["_score_trial"](*args) if self._curves[-1] else float("inf")
        return score.detach() if isinstance(score, Tensor) else score

    def _select_optimal_reconstruction(self, candidates: Any, *others: Any) -> Any:
        self._pass_interrupts_on()
        *labels, scores, stats = others
        scores = scores[: len(candidates)]
        self._chosen = int(scores.argmin())
        return self._theirs["_select_optimal_reconstruction"](candidates, *labels, scores, stats)

    def _before_objective(self, objective: Any, args: tuple[Any, ...]) -> None:
        if self._curves[-1]:
            self._stop_if_late()
        if objective.local_hyperparams is None:
            return
        objective.local_hyperparams["labels"] = [args[-1]] * objective.local_hyperparams["steps"]
        for regularizer in self._attacker.regularizers:
            for hook in filter(None, getattr(regularizer, "refs", [])):
                hook.__deepcopy__ = lambda _, hook=hook: hook


@contextmanager
def listening(library: str) -> Iterator[list[str]]:
    """Keep a library off the terminal: yield what it logs or prints meanwhile, and drop its warnings.

    Its prints are caught by their name in its own modules, because ``sys.stdout`` may belong to a
    progress display that draws from another thread.

    Args:
        library: Its top-level package.
    """
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.getMessage().startswith("| It:"):
                messages.append(record.getMessage())

    logger = logging.getLogger(library)
    handler, level, propagate = Keep(), logger.level, logger.propagate
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
