"""Third parties' entries: what is admitted, and why the rest is not."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedmjp.benchmarks.folder.study import read_study
from fedmjp.benchmarks.leaderboard.admission import SUBMITTED, UNCHECKED, admit, read_submitted
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.consistency import AdmissionError, check_consistency
from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.plausible import impossible_figures, impossible_origin
from fedmjp.benchmarks.leaderboard.record import SCHEMA_VERSION
from fedmjp.benchmarks.leaderboard.submissions import Submission
from fedmjp.benchmarks.report.render import board_in
from fedmjp.config import digest_of
from fedmjp.errors import BadInputError, ConfigError, OutputError
from fedmjp.threat import ThreatModel
from tests.boards import ENVIRONMENTS, Row, board, cell, grey, ledger_of, near

RESULTS = Path(__file__).parents[1] / "results"
KNOWN = {"model": "deit_tiny"}
NOISED = ("mjp", "gaussian")
ROWS = (
    Row(cell("gradient_matching", **KNOWN), near(25)),
    grey(**KNOWN),
    Row(cell("gradient_matching", defence="none", **KNOWN), near(80)),
    grey("none", **KNOWN),
)
SEVERAL = (
    Row(cell("gradient_matching", NOISED, "c", **KNOWN), near(25)),
    grey(NOISED, "c", **KNOWN),
    Row(cell("gradient_matching", "none", **KNOWN), near(80)),
    Row(cell("gradient_matching", "mjp", "c", **KNOWN), near(30)),
    Row(cell("gradient_matching", "gaussian", **KNOWN), near(60)),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A board's folder."""
    ledger, _ = ledger_of(ROWS)
    (tmp_path / "board").mkdir()
    ledger.save(tmp_path / "board")
    return tmp_path / "board"


@cache
def _usual() -> str:
    """What most tests submit: its bootstrap takes longer than the tests do."""
    return json.dumps(submission(*ROWS))


@cache
def _of_batches() -> str:
    levels = [30.0 + 3 * (place // 2) + place for place in range(8)]
    batches = ThreatModel(batch_size=2)
    rows = (Row(cell("gradient_matching", "none", threat=batches, **KNOWN), levels), grey("none", threat=batches))
    return json.dumps(submission(*(row.on(**KNOWN) for row in rows)))


def submission(*rows: Row, **about: Any) -> dict:
    """A file of entries, as `fedmjp` itself would write them."""
    if not rows:
        return json.loads(_usual())
    entries = [entry.model_dump(mode="json") for entry in board(*rows, name="theirs", **about).entries]
    submitter = {"name": "A", "contact": "a@example.org", "link": "https://example.org"}
    return {"schema_version": SCHEMA_VERSION, "submitter": submitter, "entries": entries}


def write(folder: Path, content: object) -> Path:
    path = folder.parent / "entry.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(path: str, value: object, content: dict | None = None) -> dict:
    """A submission with one value replaced, by dotted path."""
    content = content or submission()
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    place = content
    for key in keys:
        place = place[key]
    place[last] = value
    return content


def consistent(content: dict) -> tuple[BoardEntry, ...]:
    """The entries of a submission that agrees with itself, with all figures as computed here."""
    return check_consistency(Submission.read(json.dumps(content))).entries


def test_entries_that_agree_with_themselves_and_were_not_run_again_are_claims(folder):
    entries = consistent(submission())
    assert (entries[0].origin, entries[0].verdict, entries[0].submitter.name) == ("submitted", "reduced", "A")
    assert {entries[0].floor, entries[0].twin} == {entries[1].id, entries[2].id}
    admitted = admit(write(folder, submission()), folder)
    assert read_submitted(folder) == admitted
    assert admitted.entries == ()
    assert [(one.defence, one.attack, one.n, one.exact, one.check) for one in admitted.claims] == [
        ("mjp", "gradient_matching", 8, 0, "claimed"), ("none", "gradient_matching", 8, 8, "claimed"),
    ]  # fmt: skip
    assert admitted.claims[0].middle == pytest.approx(25, abs=0.5)


def test_claims_change_nothing_of_a_board_but_its_claims(folder):
    admitted = admit(write(folder, submission()), folder)
    ledger, trials = ledger_of(ROWS)
    ours = board_of(ledger, trials, ENVIRONMENTS)
    both = board_of(ledger, trials, ENVIRONMENTS, submitted=admitted.entries, claims=admitted.claims)
    assert both.model_copy(update={"claims": (), "about": ours.about}) == ours
    assert both.claims == admitted.claims


def test_files_that_former_versions_admitted_are_claims(folder):
    content = Submission(**vars(check_consistency(Submission.read(json.dumps(submission()))))).model_dump(mode="json")
    del content["recipe"]
    for entry in content["entries"]:
        del entry["check"]
    (folder / SUBMITTED).mkdir()
    stored = {"sha256": digest_of(content), "submission": content}
    (folder / SUBMITTED / f"{content['entries'][0]['id']}.json").write_text(json.dumps(stored))
    found = read_submitted(folder)
    assert (found.entries, [claim.reason for claim in found.claims]) == ((), [UNCHECKED] * 2)


def test_an_entry_is_admitted_once(folder):
    admit(write(folder, submission()), folder)
    with pytest.raises(AdmissionError, match="is there already"):
        admit(write(folder, submission()), folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("entries.0.metrics.psnr.mean", 12.0, r"psnr mean is 12.0, but its scores per picture give 25\.0"),
        ("entries.0.metrics.psnr.median", 12.0, "psnr median is 12.0"),
        ("entries.0.metrics.psnr.p95", 12.0, "psnr p95 is 12.0"),
        ("entries.0.metrics.psnr.low", 12.0, "psnr low is 12.0"),
        ("entries.0.metrics.psnr.worst", 12.0, "psnr worst is 12.0"),
        ("entries.0.n", 7, "n = 7 and trials = 8 do not fit 8 pictures"),
        ("entries.0.over_floor.mean", 0.1, "over_floor mean is 0.1"),
        ("entries.0.over_twin", None, "over_twin mean is None"),
        ("entries.0.exposed", 0, "exposed is 0, but its scores per picture give 8"),
        ("entries.0.recognisable.share", 0.5, "recognisable share is 0.5"),
        ("entries.0.exact.share", 0.5, r"exact share is 0.5, but its scores per picture give 0\.0"),
        ("entries.0.exact", None, None),
        ("entries.1.flat", {"p0": 75.0}, "p0 counts, but is flat in another entry or in this one"),
        ("entries.0.flat", {"p9": 75.0}, "n = 8 and trials = 8 do not fit 8 pictures with scores, 1 flat ones"),
        (
            "entries.0.verdict",
            "withstood",
            "claims 'withstood', but the rules say 'reduced': 0 of 8 exactly, median 25.0 dB",
        ),
        ("entries.0.adapted", True, None),
        ("entries.2.adapted", True, "does not take the defence none into account"),
        ("entries.0.role", "bound", "gradient_matching has the role attack, not bound"),
        ("entries.1.attack", "my_guess", "'my_guess' is no floor that is known here"),
        ("entries.0.attack", "my_attack", "over twin is given, but not the entry to compare with"),
        ("entries.0.provenance.environments", [], "its provenance lacks environments"),
        ("entries.0.provenance.environments", [{}], "its provenance lacks an environment"),
        ("entries.0.provenance.pictures_sha256", "", "its provenance lacks pictures_sha256"),
        ("entries.0.provenance.weights_sha256", [], "its provenance lacks weights_sha256"),
        ("entries.0.provenance.seeds", [], "its provenance lacks seeds"),
    ],
)
def test_a_claim_that_does_not_follow_is_refused(folder, path, value, message):
    content = changed(path, value)
    if message is None:
        assert consistent(content)[0].exact.share == 0
        assert admit(write(folder, content), folder).claims
        return
    with pytest.raises(BadInputError, match=message) as caught:
        admit(write(folder, content), folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "submitted").exists()


def test_an_interval_within_monte_carlo_error_passes_and_is_replaced_by_ours(folder):
    content = submission()
    ours = content["entries"][0]["metrics"]["psnr"]["low"]
    found = consistent(changed("entries.0.metrics.psnr.low", ours + 0.01, content))[0]
    assert found.metrics["psnr"].low == pytest.approx(ours, abs=1e-6)


def test_a_floor_left_out_changes_the_verdict(folder):
    content = submission()
    del content["entries"][3], content["entries"][1]
    for entry in content["entries"]:
        entry |= {"over_floor": None, "exposed": 0}
    with pytest.raises(AdmissionError, match=r"the rules say 'inconclusive': .*25\.0 dB, and no guess to compare with"):
        admit(write(folder, content), folder)


@pytest.mark.parametrize(
    ("together", "message"),
    [
        (None, None),
        ({}, "2 pictures are behind each upload, so that 8 trials are of 4 uploads at most, not of 8: say in together"),
        ({f"p{place}": place // 2 for place in range(6)}, "together is not of the pictures with scores"),
        ({f"p{place}": place for place in range(8)}, "of 4 uploads at most, not of 8"),
        ({f"p{place}": place // 4 for place in range(8)}, "together names 4 pictures of one upload, which is of 2"),
        ({f"p{place}": place % 4 for place in range(8)}, "psnr low is"),
    ],
)
def test_who_submits_batches_says_which_pictures_came_together(folder, together, message):
    content = json.loads(_of_batches())
    if together is not None:
        content["entries"][0]["together"] = together
    if message is None:
        assert consistent(content)[0].uploads == 4
        return
    with pytest.raises(AdmissionError, match=message):
        admit(write(folder, content), folder)


def test_two_entries_of_one_cell_are_refused(folder):
    content = submission()
    content["entries"].append(content["entries"][0])
    with pytest.raises(AdmissionError, match="two entries are of the same cell"):
        admit(write(folder, content), folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "Input should be an object"),
        ({}, "key 'submitter' is missing; key 'entries' is missing"),
        (changed("verdct", "leaks"), "unknown key 'verdct'"),
        (changed("entries.0.verdct", "leaks"), "entry 1: unknown key 'verdct', did you mean 'verdict'?"),
        (changed("entries.0.n", "8"), "entry 1: n = '8': Input should be a valid integer"),
        (changed("entries.0.metrics.psnr.mean", float("nan")), "finite number"),
        (changed("entries.0.verdict", "private"), "entry 1: verdict = 'private': Input should be 'leaks'"),
        (changed("entries", []), "at least 1 item"),
        (changed("schema_version", 1), "schema_version is 1, this version reads 4: take the entries anew from the lea"),
        (
            changed("entries.0", {"schema_version": 3, "leakage": {}}),
            "entry 1: schema_version is 3, this version reads 4: take the entries anew from the leaderboard.json that",
        ),
    ],
)
def test_a_file_of_another_form_is_refused_in_one_line(folder, content, message):
    with pytest.raises(ConfigError) as caught:
        admit(write(folder, content), folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_or_board_that_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        admit(tmp_path / "none.json", folder)
    with pytest.raises(OutputError, match="holds no results"):
        admit(write(folder, submission()), tmp_path)


@pytest.mark.parametrize("damage", ["12.6", "cut", "name"])
def test_a_tampered_file_is_named_and_left_out(folder, damage):
    admit(write(folder, submission()), folder)
    (path,) = (folder / SUBMITTED).iterdir()
    if damage == "name":
        path.rename(path.with_name("other.json"))
    else:
        text = path.read_text()
        path.write_text(text[:-60] if damage == "cut" else text.replace('"caveat": null', '"caveat": "fine"', 1))
    told: list[str] = []
    assert read_submitted(folder, tell=told.append) == ((), ())
    assert len(told) == 1
    assert "is left out" in told[0]


def test_consistent_tampering_is_caught(folder):
    admit(write(folder, submission()), folder)
    (path,) = (folder / SUBMITTED).iterdir()
    stored = json.loads(path.read_text())
    stored["submission"]["entries"][0]["verdict"] = "withstood"
    path.write_text(json.dumps(stored))
    told: list[str] = []
    assert read_submitted(folder, tell=told.append) == ((), ())
    assert "changed after" in told[0]


def test_a_refused_cell_is_not_taken(folder):
    content = submission(Row(cell("gradient_matching"), refusal="does not apply"), *ROWS[1:])
    with pytest.raises(AdmissionError, match="an attack that was not run has nothing to show"):
        admit(write(folder, content), folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attack": "my_mighty_attack", "adapted": True}, "attack 'my_mighty_attack' is not installed here"),
        ({"defences": [{"name": "halved"}], "defence": "halved"}, "defence 'halved' is not installed here"),
    ],
)
def test_what_is_not_installed_here_is_a_claim(folder, changes, reason):
    content = submission()
    del content["entries"][1:]
    content["entries"][0] |= {"over_floor": None, "over_twin": None, "exposed": 0, "verdict": "inconclusive"} | changes
    admitted = admit(write(folder, content), folder)
    assert (admitted.entries, [claim.reason for claim in admitted.claims]) == ((), [reason])
    assert read_submitted(folder) == admitted
    with pytest.raises(AdmissionError, match="is there already"):
        admit(write(folder, content), folder)


def test_several_third_parties_may_submit_the_same_floor_and_twin(folder):
    admit(write(folder, submission()), folder)
    other = submission()
    other["submitter"] |= {"name": "B", "contact": "b@example.org"}
    assert {claim.submitter.name for claim in admit(write(folder, other), folder).claims} == {"B"}


def test_what_each_defence_adds_is_computed_again(folder):
    found, *others = consistent(submission(*SEVERAL))
    assert {each.defence: round(each.difference.mean, 6) for each in found.marginal} == {"mjp": -35, "gaussian": -5}
    assert [each.twin for each in found.marginal] == [entry.id for entry in others[3:1:-1]]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("entries.0.marginal.0.difference.mean", -1.0, "marginal of mjp mean is -1.0"),
        ("entries.0.marginal", [], "marginal of mjp mean is None"),
        ("entries.0.defence", "mjp", r"defence is 'mjp', but its defences make 'mjp \+ gaussian'"),
        ("entries.0.threat.defences", [], r"names none on the uploads, but its defences make gaussian"),
        ("entries.4.threat.defences", [], r"names none on the uploads, but its defences make gaussian"),
        ("entries.0.setting", "a", "its defences shuffle the picture, which is not setting a"),
        ("entries.4.setting", "c", "its defences do not shuffle the picture, which is not setting c"),
        ("entries.0.mask_ratio", 0.1, "its mask ratio is 0.1, but that of its defences 0.27"),
    ],
)
def test_what_clients_did_is_told_one_way_only(folder, path, value, message):
    with pytest.raises(BadInputError, match=message) as caught:
        admit(write(folder, changed(path, value, submission(*SEVERAL))), folder)
    assert "\n" not in str(caught.value)


def test_a_gain_over_an_entry_that_is_not_there_is_refused(folder):
    content = submission(*SEVERAL)
    del content["entries"][4]
    with pytest.raises(AdmissionError, match="marginal of mjp is given, but not the entry to compare with"):
        admit(write(folder, content), folder)


SEVEN = dict.fromkeys(("mean", "low", "high", "median", "p95", "worst"), 7.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("entries.0.scores.mse.p0", -1.0, r"mse of 'p0' is -1\.0; it can be 0 \(exact\) to 1"),
        ("entries.1.metrics.mse.worst", -1.0, r"grey, setting a: mse worst is -1\.0; it can be 0 \(exact\) to 1"),
        ("entries.0.metrics.ssim", SEVEN, "ssim has no scores per picture"),
        ("entries.0.scores.ssim", {"p0": 7.0}, "ssim has no statistics"),
        ("entries.0.metrics.mse.worst", 0.5, r"mse worst is 0\.5, but its scores per picture give 0\.0029"),
        ("entries.0.metrics.mse.mean", 0.9, r"mse mean is 0\.9, but its scores per picture give 0\.003"),
        ("entries.0.scores.mse.p0", 0.01, r"mse of 'p0' is 0\.01, but the psnr makes 0\.0033"),
        ("entries.0.scores.psnr.p0", 500.0, r"psnr of 'p0' is 500\.0; it can be 0 to 200 dB"),
        ("entries.0.scores.mse", {"p0": 0.01}, "mse is not of the same pictures as psnr: 1 and 8 have scores"),
        ("entries.0.reveals", "labels", "gradient_matching reveals pictures, not labels"),
        ("entries.0.cost.attack_seconds", -5.0, "attack_seconds = -5.0: Input should be greater than or equal to 0"),
        ("entries.0.cost.upload_bytes", -5, "upload_bytes = -5"),
        ("entries.0.realised_ratio", 0.9, "0.9 of the patches were masked, but its defences mask 0.27 at most"),
        ("entries.0.weights", "=1", "'=1' is no SHA-256"),
        ("entries.0.provenance.config_sha256", "zz", "'zz' is no SHA-256"),
        ("entries.0.provenance.config_sha256", "ab" * 32, "config_sha256 is 'abab.* which it is held against, has"),
        ("entries.0.provenance.pictures_sha256", "ab" * 32, "disagree whether mjp, grey"),
        ("entries.0.provenance.campaign", "other", "campaign is 'other', but mjp, grey"),
        ("entries.0.provenance.data", "other", "data is 'other'"),
        ("entries.0.provenance.seeds", [5], r"seeds is \(5,\)"),
        ("entries.0.provenance.seeds", [0, 0], "seeds are not different numbers"),
        ("entries.0.provenance.first", "2999-01-01T00:00:00", "which cannot be"),
        ("entries.0.provenance.last", "2020-01-01T00:00:00", "which cannot be"),
        ("entries.0.provenance.first", "yesterday", "'yesterday' and .* are not of the form"),
        ("entries.0.model", "a\x1b[31m", r"the text 'a\\x1b\[31m' cannot be printed"),
        ("entries.0.reason", "a" * 3000, "longer than 2,000 letters"),
        ("entries.0.attack", "\ud800", "cannot be printed"),
        (
            "submitter.name",
            "<img src=x onerror=alert(1)>",
            r"submitter: the name '<img .*>' holds '<'; names are of lett",
        ),
        ("entries.0.attack", 'x"y', """entry 1, attack: the name 'x"y' holds '"'"""),
        ("entries.0.model", "a\u202eb", r"entry 1, model: the name 'a\\u202eb' holds '\\u202e'"),
        ("entries.0.defence", "m/p", "entry 1, defence: the name 'm/p' holds '/'"),
        ("entries.0.provenance.campaign", "a" * 81, "entry 1, campaign: the name 'a+' has 81 characters; 80 at most"),
    ],
)
def test_what_nothing_can_be_is_refused(folder, path, value, message):
    with pytest.raises(BadInputError, match=message) as caught:
        admit(write(folder, changed(path, value)), folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "submitted").exists()


def test_weights_are_those_of_the_twin_where_the_model_is(folder):
    content = changed("entries.1.provenance.weights_sha256", ["cd" * 32], submission(*SEVERAL))
    with pytest.raises(AdmissionError, match=r"weights_sha256 is not that of .*though both are of the same model"):
        admit(write(folder, content), folder)


@pytest.mark.parametrize(
    "again",
    [
        lambda content: [entry["provenance"].update(campaign="other") for entry in content["entries"]],
        lambda content: content["submitter"].update(name=" a ", contact="b@example.org"),
        lambda content: content["submitter"].update(name="B"),
        lambda content: content["entries"].reverse(),
    ],
    ids=["campaign", "name", "contact", "order"],
)
def test_the_same_under_another_name_is_there_already(folder, again):
    admit(write(folder, submission()), folder)
    content = submission()
    again(content)
    with pytest.raises(AdmissionError, match=r"is there already, as entry \w{16} of .*: to replace it"):
        admit(write(folder, content), folder)
    assert len(list((folder / "submitted").iterdir())) == 1


def test_every_entry_that_was_measured_here_is_possible():
    ledger, store = read_study(RESULTS / "smoke")
    entries = [each for each in board_in(ledger, store, RESULTS / "smoke").entries if each.metrics]
    assert len(entries) > 50
    for each in entries:
        assert [*impossible_figures(each), *impossible_origin(each)] == []
