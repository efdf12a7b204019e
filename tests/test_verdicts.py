"""Every rule of the verdicts, and the figure at which it flips."""

from dataclasses import replace

import pytest

from fedmjp.benchmarks.leaderboard.entries import Difference
from fedmjp.benchmarks.leaderboard.standings import rank_models
from fedmjp.benchmarks.leaderboard.verdicts import judge
from fedmjp.errors import GAVE_UP
from fedmjp.threat import ThreatModel
from tests.boards import NOISE, Row, board, cell, entry, grey, near

TWIN = (Row(cell(defence="none"), near(80)), grey("none"))
WEAK_TWIN = (Row(cell(defence="none"), near(12.6)), grey("none"))


def defended(*leakage, **values):
    return Row(cell(), leakage or near(12.6), **values)


def standing(*rows, defence="mjp", **about):
    found = [each for each in board(*rows, **about).standings if each.defence == defence]
    assert len(found) == 1
    return found[0]


# The cell


def test_a_defended_cell_near_the_guess_has_withstood():
    found = entry(defended(adapted=True), grey(), *TWIN)
    assert found.verdict == "withstood"
    assert found.reason == (
        "0 of 8 exactly, median 12.6 dB; mean 0.1 dB over grey (-0.1 to 0.3); "
        "without the defence 8 of 8 exactly, median 80.0 dB"
    )


def test_a_naive_attack_that_failed_says_that_it_is_no_evidence():
    found = entry(defended(), grey(), *TWIN)
    assert found.verdict == "naive attack failed"
    assert found.reason.endswith("the attack does not know the defence, so this is no evidence of protection")


@pytest.mark.parametrize(("over", "verdict"), [(0.9, "inconclusive"), (1.1, "reduced")])
def test_recovered_from_one_decibel_over_the_guess(over, verdict):
    assert entry(defended(*near(12.5 + over)), grey(), *TWIN).verdict == verdict


@pytest.mark.parametrize(("spread", "verdict"), [(1, "reduced"), (12, "inconclusive")])
def test_not_recovered_if_the_interval_holds_zero(spread, verdict):
    leakage = [14 + spread * noise for noise in NOISE]
    found = entry(defended(*leakage), grey(), *TWIN)
    assert (found.verdict, found.over_floor.low > 0) == (verdict, verdict == "reduced")


def test_not_recovered_if_the_signed_ranks_are_not_significant():
    found = entry(defended(19, 19, 19, 12.4, 12.4, 12.4, 12.4, 12.4), grey(), *TWIN)
    assert found.over_floor.mean > 1
    assert found.over_floor.low > 0 or found.over_floor.p_value > 0.05
    assert found.verdict == "inconclusive"
    assert "does not exclude 1 dB" in found.reason


@pytest.mark.parametrize(("victim", "verdict"), [(19.9, "inconclusive"), (20.1, "reduced")])
def test_one_exposed_picture_is_a_leak_however_low_the_mean(victim, verdict):
    found = entry(defended(victim, *near(9)[1:]), grey(), *TWIN)
    assert found.over_floor.mean < 0
    assert (found.verdict, found.exposed) == (verdict, int(victim > 20))


def test_a_picture_that_a_guess_recognises_is_not_exposed():
    bright = replace(grey(), leakage=[22.0] * 8)
    assert entry(defended(*near(22.1)), bright, *TWIN).exposed == 0
    assert entry(defended(*near(25.5)), bright, *TWIN).exposed == 8


@pytest.mark.parametrize(("twin", "verdict"), [(30.2, "leaks"), (40, "reduced")])
def test_reduced_only_if_less_than_without_the_defence(twin, verdict):
    leakage = [30 + 4 * noise for noise in NOISE]
    found = entry(defended(*leakage), grey(), Row(cell(defence="none"), near(twin)), grey("none"))
    assert found.verdict == verdict


def test_a_leak_without_a_twin_leaks():
    assert entry(defended(*near(30)), grey()).verdict == "leaks"


@pytest.mark.parametrize("twin", [(), WEAK_TWIN])
def test_inconclusive_if_the_attack_is_not_seen_to_work_without_the_defence(twin):
    assert entry(defended(adapted=True), grey(), *twin).verdict == "inconclusive"


def test_inconclusive_if_there_is_no_guess_to_compare_the_twin_with():
    found = entry(Row(cell(setting="b"), near(12.6), adapted=True), grey(setting="b"), TWIN[0])
    assert found.verdict == "inconclusive"
    assert found.reason.endswith("no guess to compare the cell without the defence with")


def test_inconclusive_if_the_twin_is_incomplete():
    twin = Row(cell(defence="none"), [*near(80)[:-1], None])
    found = entry(defended(adapted=True), grey(), twin, grey("none"))
    assert (found.verdict, "incomplete" in found.reason) == ("inconclusive", True)


def test_inconclusive_without_a_guess():
    found = entry(defended(*near(30)), Row(cell(defence="none"), near(80)))
    assert (found.verdict, found.reason) == (
        "inconclusive",
        "0 of 8 exactly, median 30.0 dB, and no guess to compare with",
    )


def test_inconclusive_while_the_guess_is_incomplete():
    guess = replace(grey(), leakage=[12.5, *[None] * 7])
    assert entry(defended(*near(30)), guess, *TWIN).verdict == "inconclusive"


@pytest.mark.parametrize(("batch", "verdict"), [(1, "withstood"), (2, "inconclusive")])
def test_few_uploads_decide_nothing_however_many_pictures_they_are_of(batch, verdict):
    rows = [row.on(threat=ThreatModel(batch_size=batch)) for row in (defended(adapted=True), grey(), *TWIN)]
    found = entry(*rows)
    assert (found.verdict, found.n, found.uploads) == (verdict, 8, 8 // batch)
    if batch > 1:
        assert found.together == {f"p{place}": place // 2 for place in range(8)}
        assert found.reason.startswith("0 of 8 exactly from 4 uploads, median 12.6 dB; mean 0.1 dB over grey")
        assert found.reason.endswith("; fewer than 6 uploads decide nothing")


@pytest.mark.parametrize(("n", "verdict"), [(5, "inconclusive"), (6, "withstood")])
def test_few_pictures_withstand_nothing(n, verdict):
    rows = [defended(adapted=True), grey(), *TWIN]
    found = entry(*(replace(row, leakage=row.leakage[:n]) for row in rows))
    assert found.verdict == verdict


def judged(*rows, **figures):
    """The verdict on the first cell with some of its figures replaced."""
    first, floor, twin, *_ = board(*rows).entries
    return judge(first.model_copy(update=figures), floor, twin).verdict


@pytest.mark.parametrize(
    ("low", "p_value", "verdict"), [(0.1, 0.04, "reduced"), (-0.1, 0.04, "inconclusive"), (0.1, 0.06, "inconclusive")]
)
def test_recovered_needs_interval_and_test(low, p_value, verdict):
    over = Difference(mean=2, low=low, high=4, p_value=p_value, n=8)
    assert judged(defended(), grey(), *TWIN, over_floor=over) == verdict


@pytest.mark.parametrize(("n", "verdict"), [(8, "withstood"), (7, "inconclusive")])
@pytest.mark.parametrize("which", ["over_floor", "over_twin"])
def test_guess_and_twin_have_to_be_of_the_same_pictures(which, n, verdict):
    over = Difference(mean=0, low=-0.5, high=0.5, p_value=1, n=n)
    assert judged(defended(adapted=True), grey(), *TWIN, **{which: over}) == verdict


def test_inconclusive_if_too_many_trials_of_the_guess_failed():
    first, floor, twin, _ = board(defended(*near(30)), grey(), *TWIN).entries
    assert judge(first, floor, twin).verdict == "reduced"
    assert judge(first, floor.model_copy(update={"failures": 2}), twin).verdict == "inconclusive"


def test_few_pictures_can_leak():
    rows = [defended(*near(30)), grey(), *TWIN]
    assert entry(*(replace(row, leakage=row.leakage[:2]) for row in rows)).verdict == "leaks"


@pytest.mark.parametrize(("leakage", "verdict"), [(12.6, "no leak seen"), (14, "leaks"), (80, "leaks")])
def test_undefended(leakage, verdict):
    assert entry(Row(cell(defence="none"), near(leakage)), grey("none")).verdict == verdict


@pytest.mark.parametrize(
    ("leakage", "twin", "adapted", "verdict"),
    [
        (80, 80, False, "leaks"),
        (30, 80, False, "reduced"),
        (12.6, 80, False, "naive attack failed"),
        (12.6, 80, True, "withstood"),
        (12.6, 12.6, True, "inconclusive"),
        (12.6, None, True, "inconclusive"),
    ],
)
def test_a_client_that_adds_noise_is_no_control_of_its_own(leakage, twin, adapted, verdict):
    twins = [Row(cell(defence="none"), near(twin))] if twin else []
    rows = (Row(cell(defence="gaussian"), near(leakage), adapted=adapted), grey("gaussian"), *twins, grey("none"))
    assert entry(*rows).verdict == verdict


def test_shuffling_alone_is_judged_like_a_defence():
    rows = (Row(cell(defence="none", setting="c"), near(12.6)), grey("none", "c"), *TWIN)
    assert entry(*rows).verdict == "naive attack failed"
    assert entry(*rows).twin == board(*rows).entries[2].id


def test_a_missing_trial_makes_a_cell_incomplete():
    found = entry(defended(*near(30)[:-1], None), grey(), *TWIN)
    assert (found.verdict, found.reason) == ("incomplete", "1 of 8 trials are not run yet")


@pytest.mark.parametrize(("failures", "verdict"), [(1, "reduced"), (2, "incomplete")])
def test_more_than_a_twentieth_failed_makes_a_cell_incomplete(failures, verdict):
    rows = [defended(*near(30)), grey(), *TWIN]
    many = [replace(row, seeds=4, leakage=[value for value in row.leakage for _ in range(4)]) for row in rows]
    many[0] = replace(many[0], leakage=[*many[0].leakage[failures:], *["broke down"] * failures])
    found = entry(*many)
    assert (found.verdict, found.failures, found.errors) == (verdict, failures, ("broke down",))


def test_attacks_that_gave_up_are_a_result_that_nothing_follows_of():
    lost = Row(cell("patch"), [*near(12)[:2], *[f"{GAVE_UP}too much noise"] * 6], adapted=True)
    found = entry(lost, grey(), *TWIN)
    assert (found.verdict, found.reason) == ("inconclusive", f"6 of 8 trials failed: {GAVE_UP}too much noise")
    late = replace(lost, leakage=[*lost.leakage[:-1], None])
    assert entry(late, grey(), *TWIN).verdict == "incomplete"
    assert standing(lost, defended(adapted=True), grey(), *TWIN).verdict == "inconclusive"
    assert standing(lost, defended(*near(30)), grey(), *TWIN).verdict == "reduced"


def test_a_refused_cell_says_why():
    found = entry(Row(cell(), refusal="does not apply"), grey(), *TWIN)
    assert (found.verdict, found.reason, found.n) == ("refused", "does not apply", 0)


def test_references_are_no_verdicts():
    bound = Row(cell("oracle", role="bound"), near(80))
    found = board(bound, grey(), *TWIN)
    assert [each.verdict for each in found.entries[:2]] == ["bound", "floor"]
    assert all(each.strongest == "april" for each in found.standings)


# Flat pictures

RED, TEXTURED = 200.0, 12.0  # what a picture's own mean colour scores of it, in dB


def among(flat, leakage, colours, **values):
    """The verdict on a defended cell whose guess and twin are of the same pictures, the last ones flat or not."""
    colours = [*colours, *[RED if flat else TEXTURED] * (len(leakage) - len(colours))]
    rows = [defended(*leakage, **values), grey(), *TWIN]
    return entry(*(replace(row, leakage=row.leakage[: len(leakage)], colours=colours) for row in rows))


@pytest.mark.parametrize(("flat", "verdict"), [(False, "reduced"), (True, "inconclusive")])
def test_a_red_square_recovered_among_textured_pictures_that_fail_is_no_leak(flat, verdict):
    found = among(flat, [*near(12.5)[:5], 75.0], [TEXTURED] * 5)
    assert (found.verdict, found.exposed, found.n) == (verdict, 0 if flat else 1, 5 if flat else 6)
    assert found.reason.endswith("1 flat picture does not count") is flat
    assert found.exact.share == (0 if flat else pytest.approx(1 / 6))
    assert found.flat == ({"p5": 75.0} if flat else {})
    assert found.metrics["psnr"].worst == (max(near(12.5)[:5]) if flat else 75)


def test_a_textured_picture_that_leaks_among_flat_ones_is_a_leak():
    found = among(True, [45.0, *[75.0] * 7], [TEXTURED])
    assert (found.verdict, found.exposed, found.n, len(found.flat)) == ("leaks", 1, 1, 7)
    assert found.reason.endswith("7 flat pictures do not count")
    assert (found.exact.share, found.metrics["psnr"].mean) == (1, 45)


def test_pictures_that_are_all_flat_decide_nothing():
    found = among(True, [75.0] * 8, [])
    assert (found.verdict, found.n, found.exact) == ("inconclusive", 0, None)
    assert found.reason.startswith("every picture is flat: its mean colour alone scores 25 dB or more")


@pytest.mark.parametrize(("colour", "counted"), [(24.9, 8), (25.0, 7)])
def test_a_picture_is_flat_from_25_decibels_of_its_mean_colour_on(colour, counted):
    assert among(False, near(12.6), [colour]).n == counted


def test_where_nobody_recorded_which_pictures_are_flat_all_count_and_the_board_says_so():
    found = board(defended(), grey(), *TWIN)
    assert (found.entries[0].flat, found.entries[0].n) == (None, 8)
    assert "These trials do not say which pictures are flat: all count." in found.notes


# The standing


def test_withstood_stands_only_with_an_adapted_attack():
    naive, adapted = Row(cell("patch"), near(12.5)), defended(adapted=True)
    twin = Row(cell("patch", "none"), near(80))
    assert standing(naive, twin, adapted, grey(), *TWIN).verdict == "withstood"
    found = standing(naive, twin, replace(adapted, adapted=False), grey(), *TWIN)
    assert (found.verdict, found.rank, found.attacks, found.adapted) == ("inconclusive", None, 2, False)
    assert found.reason == (
        "no attack that takes the defence into account was run; 2 naive ones recovered no more than a guess"
    )


def test_an_adapted_attack_that_works_nowhere_proves_nothing():
    adapted = Row(cell("patch"), near(12.5), adapted=True)
    twin = Row(cell("patch", "none"), near(12.6))
    found = standing(adapted, twin, defended(), grey(), *TWIN)
    assert (found.verdict, found.adapted) == ("inconclusive", True)
    assert found.reason.startswith("patch takes the defence into account: ")


def test_a_leak_wins_over_a_stronger_attack_that_was_withstood():
    victim = Row(cell("patch"), [20.5, *near(9)[1:]])
    found = standing(victim, defended(adapted=True), grey(), *TWIN)
    assert (found.strongest, found.verdict) == ("april", "leaks")
    assert found.reason.startswith("patch: ")


def test_nothing_is_withstood_while_an_attack_is_incomplete():
    late = Row(cell("patch"), [*near(12)[:-1], None])
    found = standing(late, defended(adapted=True), grey(), *TWIN)
    assert (found.verdict, found.rank) == ("incomplete", None)


def test_nothing_is_ranked_while_another_attack_is_incomplete():
    late = Row(cell("patch"), [*near(50)[:-1], None])
    found = standing(late, defended(*near(30)), grey(), *TWIN)
    assert (found.strongest, found.verdict, found.rank) == ("patch", "incomplete", None)


def test_all_refused_is_refused():
    found = standing(Row(cell(), refusal="does not apply"), grey(), *TWIN)
    assert (found.verdict, found.rank, found.attacks) == ("refused", None, 0)


def test_a_refused_attack_beside_others_changes_nothing():
    found = standing(Row(cell("patch"), refusal="does not apply"), defended(adapted=True), grey(), *TWIN)
    assert (found.verdict, found.attacks) == ("withstood", 1)


def test_rank_one_leaks_least_and_equal_ones_share_a_rank():
    levels = {"m1": 50.0, "m2": 30.0, "m3": 30.02, "m4": 12.6}
    rows = [Row(cell(defence="none", model=model), near(level)) for model, level in levels.items()]
    found = board(grey("none"), *rows).standings
    assert [(each.model, each.rank) for each in found] == [("m2", 1), ("m3", 1), ("m1", 3), ("m4", None)]
    assert found[-1].verdict == "no leak seen"


def test_ranks_are_per_version_compared_with_protocol_and_server():
    several = ThreatModel(uploads_per_picture=2)
    apart = ({}, {"protocol": "8bit"}, {"setting": "b"}, {"threat": several})
    rows = [Row(cell(defence="none", **where), near(40)) for where in apart]
    guesses = grey("none"), grey("none", protocol="8bit"), grey("none", "b")
    assert [each.rank for each in board(*rows, *guesses).standings] == [1, 1, 1, 1]
    assert rank_models(board(*rows).entries)[0].setting == "a"


def test_defences_rank_beside_none_whether_they_shuffle_or_not():
    levels = {("none", "a"): 80, ("gaussian", "a"): 50, ("mjp", "c"): 30, (("mjp", "gaussian"), "c"): 20}
    rows = [Row(cell(defence=defence, setting=setting), near(level)) for (defence, setting), level in levels.items()]
    shuffled = Row(cell(setting="b"), near(15))
    found = board(*rows, shuffled, grey(), grey(setting="b")).standings
    assert [(each.defence, each.setting, each.rank) for each in found] == [
        ("mjp + gaussian", "c", 1),
        ("mjp", "c", 2),
        ("gaussian", "a", 3),
        ("none", "a", 4),
        ("mjp", "b", 1),
    ]


def test_the_strongest_attack_recovers_most_pictures_exactly_then_has_the_highest_median():
    one, many = Row(cell("one"), [200, *[30] * 7]), Row(cell("many"), [*[41] * 2, *[13] * 6])
    assert standing(one, many, grey(), *TWIN).strongest == "many", "2 of 8 are more than 1 of 8, whatever the mean"
    middle, mean = Row(cell("middle"), [25] * 8), Row(cell("mean"), [*[39] * 4, *[12] * 4])
    assert standing(middle, mean, grey(), *TWIN).strongest == "mean", "25.5 dB in the middle"
    assert standing(middle, replace(mean, leakage=[*[39] * 3, *[12] * 5]), grey(), *TWIN).strongest == "middle"


def test_ranks_go_by_the_share_recovered_exactly_then_by_the_median():
    levels = {"few": [41.0, *[14.0] * 7], "none": [39.0] * 8, "most": [40.0] * 8, "less": [39.0, *[30.0] * 7]}
    rows = [Row(cell(defence="none", model=model), leakage) for model, leakage in levels.items()]
    found = board(grey("none"), *rows).standings
    assert [(each.model, each.rank) for each in found] == [("less", 1), ("none", 2), ("few", 3), ("most", 4)]


def test_the_strongest_attack_counts_not_the_mean_of_all():
    weak, strong = Row(cell("weak"), near(12.5)), Row(cell("strong"), near(60))
    found = standing(weak, strong, grey(), *TWIN)
    assert (found.strongest, found.verdict) == ("strong", "leaks")
