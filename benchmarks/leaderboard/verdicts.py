"""Verdicts that a cell's figures allow, rule by rule; from figures alone, so that any entry can be judged again."""

from collections.abc import Iterator
from typing import NamedTuple

from fedmjp.benchmarks.leaderboard.entries import FLAT, BoardEntry, Difference, Verdict
from fedmjp.benchmarks.leaderboard.headline import recovery
from fedmjp.benchmarks.leaderboard.measures import MEASURES, Measure
from fedmjp.errors import GAVE_UP

TOLERATED = 0.05  # share of trials that may fail
SIGNIFICANT = 0.05
FEWEST = 6  # uploads, or pictures that came alone: with five, the signed-rank test cannot fall below 0.0625
COVERED = 0.9  # share of the pictures that floor and twin must have: a twentieth may fail on either side
LEAKING: frozenset[Verdict] = frozenset({"leaks", "reduced"})


class Judgement(NamedTuple):
    """A verdict, and the figures that decided in one sentence."""

    verdict: Verdict
    reason: str


def judge(entry: BoardEntry, floor: BoardEntry | None, twin: BoardEntry | None) -> Judgement:
    """Judge an entry that was not refused; flat pictures decide nothing.

    Args:
        entry: A cell; its present verdict is ignored.
        floor: The guess at the same pictures, if there is one.
        twin: The same attack on clients without defences, if there is one.
    """
    verdict, reason = next(_judgements(entry, floor, twin))
    if entry.flat:
        flat_pictures = "1 flat picture does" if len(entry.flat) == 1 else f"{len(entry.flat)} flat pictures do"
        reason += f"; {flat_pictures} not count"
    if entry.provenance.battery:
        reason += f"; battery {entry.provenance.battery}"
    return Judgement(verdict, reason)


def _judgements(entry: BoardEntry, floor: BoardEntry | None, twin: BoardEntry | None) -> Iterator[Judgement]:
    """Yield the judgements of all rules that apply, in their order: the first one counts."""
    figures = _figures(entry, floor, twin)
    if entry.role == "floor":
        yield Judgement("floor", f"a guess that uses nothing of the upload: {recovery(entry)}")
    if entry.role == "bound":
        knowledge = "was given more than any server sees, limits what attacks can reach"
        yield Judgement("bound", f"{knowledge}: {recovery(entry)}")
    # An attack that gave up would give up again: this is a result, from which nothing follows.
    if gave_up(entry):
        yield Judgement("inconclusive", f"{_explain_incomplete(entry)}: {entry.errors[0]}")
    # Nothing is said before all trials are there.
    if reason := _explain_incomplete(entry):
        yield Judgement("incomplete", reason)
    # Pictures that their mean colour gives away need no attack.
    if not entry.n:
        yield Judgement("inconclusive", f"every picture is flat: its mean colour alone scores {FLAT:g} dB or more")
    # Without a guess on the same pictures, figures mean nothing.
    if floor is None:
        yield Judgement("inconclusive", f"{recovery(entry)}, and no guess to compare with")
    elif _explain_incomplete(floor) or not _covers(entry.over_floor, entry):
        yield Judgement("inconclusive", f"{recovery(entry)}; the guess to compare with ({floor.attack}) is incomplete")
    elif _leaks(entry):
        reduced = _reduction(entry, twin)
        yield Judgement("reduced", f"{figures}, {reduced}") if reduced else Judgement("leaks", figures)
    else:
        yield from (Judgement("inconclusive", figures + doubt) for doubt in _doubts(entry, floor))
    # An undefended model that does not leak: the attack is too weak here.
    if not entry.defences:
        yield Judgement("no leak seen", figures)
    # Where the attack is not seen to work without the defence, its failure says nothing of the defence.
    yield from (Judgement("inconclusive", figures + doubt) for doubt in _doubts_of_twin(entry, twin))
    yield _withstood(entry, figures)


def _explain_incomplete(entry: BoardEntry) -> str | None:
    """Say why an entry is incomplete: trials are missing, too many failed, or there is none.

    Args:
        entry: A cell.

    Returns:
        The reason, or None if the entry is complete.
    """
    planned = entry.trials + entry.failures + entry.missing
    if entry.missing:
        return f"{entry.missing} of {planned} trials are not run yet"
    if entry.failures > TOLERATED * planned:
        return f"{entry.failures} of {planned} trials failed"
    if not entry.n and entry.left_out:
        return f"nothing to attack: the attack's own prior was made of all {entry.left_out} pictures"
    return None if entry.n or entry.flat else "there are no trials"


def gave_up(entry: BoardEntry) -> bool:
    """Tell whether all trials ran and too many gave up, which they would do again.

    Args:
        entry: A cell.
    """
    run = not entry.missing and entry.failures > TOLERATED * (entry.trials + entry.failures)
    return run and all(error.startswith(GAVE_UP) for error in entry.errors)


def _exceeds_guess(entry: BoardEntry) -> bool:
    """Tell whether an attack's mean leakage is more than that of a guess.

    The difference has to reach the measure's margin, its interval to lie above 0, and p to be below 0.05.

    Args:
        entry: A cell.
    """
    over = entry.over_floor
    if over is None or over.low is None or over.p_value is None:
        return False
    return over.mean >= MEASURES[entry.reveals].margin and over.low > 0 and over.p_value < SIGNIFICANT


def _leaks(entry: BoardEntry) -> bool:
    """Tell whether a cell leaks: more than a guess on average, or any picture exposed.

    Args:
        entry: A cell.
    """
    return _exceeds_guess(entry) or entry.exposed > 0


def _reduction(entry: BoardEntry, twin: BoardEntry | None) -> str | None:
    """Say how much less is recovered than without the defence, if interval and test both say less.

    The interval alone is too narrow for few uploads.
    """
    over = entry.over_twin
    if over is None or twin is None or _explain_incomplete(twin) or not _covers(over, entry):
        return None
    below = over.high is not None and over.high < 0 and over.p_value is not None and over.p_value < SIGNIFICANT
    return f"a mean difference of {_with_interval(over, MEASURES[entry.reveals])}" if below else None


def _doubts(entry: BoardEntry, floor: BoardEntry) -> Iterator[str]:
    """Yield why a leak is not excluded although the attack beat no guess: few uploads, or a wide interval.

    For few uploads the interval alone would exclude it too often, so that a test of its own has to, as well.
    """
    over, measure = entry.over_floor, MEASURES[entry.reveals]
    if entry.uploads < FEWEST:
        yield f"; fewer than {FEWEST} {'uploads' if entry.together else 'pictures'} decide nothing"
    if over is None or over.high is None or over.high >= measure.margin:
        yield f"; the interval does not exclude {measure.amount(measure.margin)}"
    leakage, guess = (side.scores[measure.leakage] for side in (entry, floor))
    if measure.below(leakage, guess, measure.margin, entry.together) >= SIGNIFICANT:
        yield f"; {measure.test} does not exclude {measure.amount(measure.margin)}"


def _doubts_of_twin(entry: BoardEntry, twin: BoardEntry | None) -> Iterator[str]:
    """Yield why the attack is not known to work without the defence."""
    if twin is None:
        yield "; the same attack was not run without the defence"
    elif _explain_incomplete(twin) or not _covers(entry.over_twin, entry):
        yield "; the cell without the defence is incomplete"
    elif twin.over_floor is None:
        yield "; no guess to compare the cell without the defence with"
    elif not _leaks(twin):
        yield ", where the attack recovers no more than a guess either"


def _withstood(entry: BoardEntry, figures: str) -> Judgement:
    """Judge an attack that works without the defence, and with it recovers no more than a guess.

    If the attack does not know the defence, that is its own failure and has a name of its own. So is it if it comes out
    worse than the guess: an attack that knew what it met would have answered with the guess.
    """
    over = entry.over_floor
    if not entry.adapted:
        naive = "; the attack does not know the defence, so this is no evidence of protection"
        return Judgement("naive attack failed", figures + naive)
    if over is not None and over.high is not None and over.high < -MEASURES[entry.reveals].margin:
        return Judgement("inconclusive", f"{figures}; worse than the guess, which is the attack's own failure")
    return Judgement("withstood", figures)


def _covers(difference: Difference | None, entry: BoardEntry) -> bool:
    return difference is not None and difference.n >= COVERED * entry.n


def _figures(entry: BoardEntry, floor: BoardEntry | None, twin: BoardEntry | None) -> str:
    """Write the figures: ``0 of 8 exactly, median 12.8 dB; mean 0.3 dB over grey (-0.1 to 0.7); without ...``."""
    sentence, measure = recovery(entry), MEASURES[entry.reveals]
    if entry.over_floor is not None and floor is not None:
        sentence += f"; mean {_with_interval(entry.over_floor, measure, f' over {floor.attack}')}"
    if entry.exposed and measure.exposure:
        sentence += f"; {measure.exposure.format(count=entry.exposed, n=entry.n)}"
    if twin is not None and twin.exact:
        sentence += f"; without the defence {recovery(twin)}"
    return sentence


def _with_interval(difference: Difference, measure: Measure, over: str = "") -> str:
    mean = f"{measure.scale * difference.mean:.1f} {measure.unit}{over}"
    if difference.low is None or difference.high is None:
        return mean
    return f"{mean} ({measure.scale * difference.low:.1f} to {measure.scale * difference.high:.1f})"
