"""Estimates: kinds of work by what they share, stopped in time, and taken from what is similar."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.gauss_newton.degraded import USUAL
from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.prepare import prepare
from fedmjp.benchmarks.running import tries
from fedmjp.benchmarks.running.estimate import _at_size, _in_order, _probe
from fedmjp.benchmarks.running.kinds_of_work import Nature, Work, kinds_of_work
from fedmjp.benchmarks.running.tries import Scoring, StoppedError, Tried, stopped_after

UNDOES = """\
name: undoes
title: An attack that has nothing to undo in the twin of a defence
data: {source: bundled, pictures: 2}
image_size: 64
patch_size: 8
metrics: [psnr]
grids:
  - models: [deit_micro]
    defences: [{name: quantise, bits: 4}]
    settings: [a]
    attacks: [patch_embedding_degraded]
"""


def work(name: str, size: int, nature: Nature = Nature.SOLVING, count: int = 1) -> Work:
    return Work(f"{name} {size}", "network", (name, "network"), size, count, lambda: Tried(1.0), nature)


def test_the_smallest_of_each_attack_comes_first_then_the_largest_and_what_iterates_last() -> None:
    tried = [
        work("search", 1, Nature.ITERATING), work("closed", 4), work("closed", 2), work("closed", 8),
        work("closed", 3, count=9),
    ]  # fmt: skip
    assert [one.what for one in _in_order(tried)] == ["closed 2", "search 1", "closed 8", "closed 3", "closed 4"]


@pytest.mark.parametrize(
    ("size", "known", "seconds"),
    [(4, [(1, 2.0)], 8.0), (4, [(1, 2.0), (7, 8.0)], 5.0), (8, [(1, 1.0), (1, 3.0), (3, 4.0)], 9.0)],
    ids=["in proportion", "in between", "beyond, of means"],
)
def test_what_was_not_tried_is_taken_from_similar_work(
    size: int, known: list[tuple[int, float]], seconds: float
) -> None:
    assert _at_size(size, known) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("other", "seconds"), [("another", 150.0), ("search", 20.0)], ids=["none like it was tried", "one was"]
)
def test_an_attack_that_was_not_tried_has_the_seconds_that_it_is_allowed(other: str, seconds: float) -> None:
    tried = {work(other, 1, Nature.ITERATING): Tried(20.0)}
    asked = replace(work("search", 1, Nature.ITERATING, count=6), allowed=150.0)
    assert _probe(asked, None, tried).total == 6 * seconds


def kinds(text: str, folder: Path) -> list[Work]:
    path = folder / "campaign.yaml"
    path.write_text(text)
    prepared = prepare(read_campaign(path, []), device="cpu", arithmetic="float32", command="")
    return _in_order(kinds_of_work(prepared, Scoring()))


def test_an_attack_is_tried_on_what_it_undoes_and_costs_nothing_of_that_in_the_twin(tmp_path: Path) -> None:
    defended, twin = [one for one in kinds(UNDOES, tmp_path) if "patch_embedding_degraded" in one.what]
    assert "quantise" in defended.what
    assert "quantise" not in twin.what
    assert _probe(defended, None, {twin: Tried(1.0)}).seconds == 1.0, "nothing nearer is known"
    allowed = replace(defended, allowed=150.0)
    assert _probe(allowed, None, {twin: Tried(0.0)}).seconds == 150.0


def test_a_search_that_was_not_tried_costs_the_same_of_several_uploads_of_a_picture(tmp_path: Path) -> None:
    text = UNDOES + "    threats: [{uploads_per_picture: 1}, {uploads_per_picture: 8}]\n"
    about = [one for one in kinds(text, tmp_path) if "quantise" in one.what and "degraded" in one.what]
    one, several = sorted(about, key=lambda each: "8 uploads" in each.what)
    assert "8 uploads" in several.what
    assert _probe(several, None, {one: Tried(3.0)}).total == 2 * 3.0


def wait_within_two_limits() -> None:
    with stopped_after(0.2):
        with pytest.raises(StoppedError), stopped_after(0.05):
            time.sleep(5)
        time.sleep(5)


def test_the_nearest_of_two_limits_stops_and_the_outer_one_goes_on() -> None:
    began = time.monotonic()
    with pytest.raises(StoppedError):
        wait_within_two_limits()
    assert time.monotonic() - began < 2


def test_an_upload_on_which_an_attack_was_stopped_counts_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([Tried(1.0), Tried(None, at_least=10.0)])
    monkeypatch.setattr(tries, "_recorded", lambda _source, batches: batches)
    monkeypatch.setattr(tries, "_attempt", lambda *_: (next(outcomes), []))
    upload, unused = cast("Any", type("Recorded", (), {"upload": None})), cast("Any", None)
    assert tries._with_others(Tried(1.0), unused, unused, unused, [upload, upload]) == Tried(4.0)


@pytest.mark.parametrize(
    ("name", "options", "usual"),
    [
        ("mjp_span", {"seconds": 30}, 30.0),
        ("network_degraded", {"seconds": 500}, USUAL),
        ("network_degraded", {"seconds": 20}, 20.0),
        ("patch_embedding", {}, None),
    ],
)
def test_of_a_budget_an_attack_counts_as_what_it_usually_takes(
    name: str, options: dict[str, int], usual: float | None
) -> None:
    assert ATTACKS.get(name)(options).usual_seconds == usual
