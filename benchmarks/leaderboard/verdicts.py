"""What a cell's figures allow to say, rule by rule.

The rules are asked in the order of ``RULES``; the first that applies decides. They look at figures
only, so that anybody's entries can be judged again. ``Verdict`` lists the outcomes.
"""

from typing import NamedTuple

from scipy import stats

from benchmarks.leaderboard.entries import EXPOSED, LEAKAGE, MARGIN, Difference, Entry, Verdict

TOLERATED = 0.05  # share of trials that may fail
SIGNIFICANT = 0.05
FEWEST = 6  # pictures: with five, the signed-rank test cannot fall below 0.0625
COVERED = 0.9  # share of the pictures that floor and twin must have: a twentieth may fail on either side
LEAKING: frozenset[Verdict] = frozenset({"leaks", "reduced"})


class Judgement(NamedTuple):
    """A verdict, and the figures that decided in one sentence."""

    verdict: Verdict
    reason: str


class Case(NamedTuple):
    """An entry with the guess and the undefended twin that it is held against, where there are any."""

    entry: Entry
    floor: Entry | None
    twin: Entry | None


def judge(entry: Entry, floor: Entry | None, twin: Entry | None) -> Judgement:
    """Verdict on an entry that was not refused. ``entry.verdict`` is not looked at."""
    case = Case(entry, floor, twin)
    return next(found for rule in RULES if (found := rule(case)))


def unfinished(entry: Entry) -> str | None:
    """Why an entry is incomplete: trials are missing, too many failed, or there is none. None if it is complete."""
    planned = entry.trials + entry.failures + entry.missing
    if entry.missing:
        return f"{entry.missing} of {planned} trials are not run yet"
    if entry.failures > TOLERATED * planned:
        return f"{entry.failures} of {planned} trials failed"
    if not entry.n and entry.left_out:
        return f"nothing to attack: the attack's own prior was made of all {entry.left_out} pictures"
    return None if entry.n else "there are no trials"


def recovered(entry: Entry) -> bool:
    """Whether the mean is more than a guess: by ``MARGIN``, its interval above 0, and p below 0.05."""
    over = entry.over_floor
    if over is None or over.low is None or over.p_value is None:
        return False
    return over.mean >= MARGIN and over.low > 0 and over.p_value < SIGNIFICANT


def leaking(entry: Entry) -> bool:
    """More than a guess on average, or any picture exposed: a mean hides the victim."""
    return recovered(entry) or entry.exposed > 0


def _role(case: Case) -> Judgement | None:
    """Floors and bounds are references, never judged."""
    mean = _mean(case.entry)
    if case.entry.role == "floor":
        return Judgement("floor", f"a guess that uses nothing of the upload: {mean}")
    if case.entry.role == "bound":
        return Judgement("bound", f"was given more than any server sees, limits what attacks can reach: {mean}")
    return None


def _incomplete(case: Case) -> Judgement | None:
    """Nothing is said before all trials are there."""
    reason = unfinished(case.entry)
    return Judgement("incomplete", reason) if reason else None


def _no_floor(case: Case) -> Judgement | None:
    """Without a guess on the same pictures, decibels mean nothing."""
    entry, floor, _ = case
    if floor is None:
        return Judgement("inconclusive", f"{_mean(entry)}, and no guess to compare with")
    if unfinished(floor) or not _covers(entry.over_floor, entry):
        return Judgement("inconclusive", f"{_mean(entry)}; the guess to compare with ({floor.attack}) is incomplete")
    return None


def _leaks(case: Case) -> Judgement | None:
    """More than a guess. It is less than without the defence only if interval and test of the difference say so.

    The interval alone is too narrow for few pictures.
    """
    entry, _, twin = case
    if not leaking(entry):
        return None
    over = entry.over_twin
    if over is not None and twin is not None and not unfinished(twin) and _covers(over, entry):
        below = over.high is not None and over.high < 0
        if below and over.p_value is not None and over.p_value < SIGNIFICANT:
            return Judgement("reduced", f"{_figures(case)}, a difference of {_with_interval(over)}")
    return Judgement("leaks", _figures(case))


def _undecided(case: Case) -> Judgement | None:
    """No more than a guess was found, but a leak is not excluded either: few pictures, or a wide interval.

    For few pictures the interval alone would exclude it too often, so that a test of its own has to, as well.
    """
    entry, floor, _ = case
    over = entry.over_floor
    if entry.n < FEWEST:
        return Judgement("inconclusive", f"{_figures(case)}; fewer than {FEWEST} pictures decide nothing")
    if over is None or over.high is None or over.high >= MARGIN:
        return Judgement("inconclusive", f"{_figures(case)}; the interval does not exclude {MARGIN:g} dB")
    guessed = floor.leakage if floor else {}
    beyond = [value - guessed[name] - MARGIN for name, value in entry.leakage.items() if name in guessed]
    surely = stats.wilcoxon(beyond, alternative="less", zero_method="pratt").pvalue < SIGNIFICANT
    if not surely:
        return Judgement("inconclusive", f"{_figures(case)}; a signed-rank test does not exclude {MARGIN:g} dB")
    return None


def _control(case: Case) -> Judgement | None:
    """An undefended model that does not leak: the attack is too weak here."""
    return None if case.entry.defences else Judgement("no leak seen", _figures(case))


def _no_twin(case: Case) -> Judgement | None:
    """Where the attack is not seen to work without the defence, its failure says nothing of the defence."""
    entry, _, twin = case
    if twin is None:
        reason = "; the same attack was not run without the defence"
    elif unfinished(twin) or not _covers(entry.over_twin, entry):
        reason = "; the cell without the defence is incomplete"
    elif twin.over_floor is None:
        reason = "; no guess to compare the cell without the defence with"
    elif not leaking(twin):
        reason = ", where the attack recovers no more than a guess either"
    else:
        return None
    return Judgement("inconclusive", _figures(case) + reason)


def _withstood(case: Case) -> Judgement:
    """The attack works without the defence, and with it recovers no more than a guess.

    If it does not know the defence, that is its own failure and has a name of its own. So is it if it comes out worse
    than the guess: an attack that knew what it met would have answered with the guess.
    """
    over = case.entry.over_floor
    if not case.entry.adapted:
        naive = "; the attack does not know the defence, so this is no evidence of protection"
        return Judgement("naive attack failed", _figures(case) + naive)
    if over is not None and over.high is not None and over.high < -MARGIN:
        return Judgement("inconclusive", f"{_figures(case)}; worse than the guess, which is the attack's own failure")
    return Judgement("withstood", _figures(case))


RULES = (_role, _incomplete, _no_floor, _leaks, _undecided, _control, _no_twin, _withstood)


def _covers(difference: Difference | None, entry: Entry) -> bool:
    return difference is not None and difference.n >= COVERED * entry.n


def _figures(case: Case) -> str:
    """``12.8 dB, 0.3 dB over grey (-0.1 to 0.7); without the defence 88.5 dB``."""
    entry, floor, twin = case
    said = _mean(entry)
    if entry.over_floor is not None and floor is not None:
        said += f", {_with_interval(entry.over_floor, f' over {floor.attack}')}"
    if entry.exposed:
        said += f"; {entry.exposed} of {entry.n} pictures recognisable and {EXPOSED:g} dB better than the guess"
    if twin is not None and LEAKAGE in twin.metrics:
        said += f"; without the defence {_mean(twin)}"
    return said


def _mean(entry: Entry) -> str:
    return f"{entry.metrics[LEAKAGE].mean:.1f} dB" if LEAKAGE in entry.metrics else "no figures yet"


def _with_interval(difference: Difference, over: str = "") -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.mean:.1f} dB{over}"
    return f"{difference.mean:.1f} dB{over} ({difference.low:.1f} to {difference.high:.1f})"
