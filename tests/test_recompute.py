"""A board runs third parties' entries again: what agrees counts, what does not is refused, the rest are claims."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.leaderboard.admission import Submitted, admit, read_submitted
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.consistency import AdmissionError
from fedmjp.benchmarks.leaderboard.entries import Board, Submitter
from fedmjp.benchmarks.leaderboard.packing import pack_entries
from fedmjp.benchmarks.leaderboard.submissions import PlugIn, Submission
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.report import front
from fedmjp.benchmarks.report.findings import list_findings
from fedmjp.benchmarks.report.page import page
from fedmjp.benchmarks.report.site.results import StrongestAttacks
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.recompute import Recomputer
from fedmjp.benchmarks.running.runner import run_campaign
from fedmjp.errors import BadInputError
from tests.boards import ENVIRONMENTS, Row, board, cell, grey, ledger_of, near
from tests.test_admission import ROWS

COUNT = 14  # pictures, more than a sample has
AUTHOR = Submitter(name="B. Author", contact="b@example.org", link="https://example.org")
OUR_ROWS = (*ROWS, Row(cell("gradient_matching", "gaussian", model="deit_tiny"), near(40)))


@dataclass(frozen=True)
class Theirs:
    """A campaign that was run, not at 224 pixels, with an attack that knows the defence at its size alone."""

    pictures: Path
    prepared: Prepared
    trials: pd.DataFrame
    environments: Mapping[str, Any]

    def submission(self, change: Callable[[pd.DataFrame], None] = lambda _: None) -> Submission:
        """What its author submits, figures and all, after a change of the scores."""
        trials = self.trials.assign(scores=[dict(scores) for scores in self.trials["scores"]])
        change(trials)
        plan = self.prepared.plan
        return pack_entries(plan, board_of(plan, trials, self.environments).entries, AUTHOR)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    folder = tmp_path_factory.mktemp("theirs")
    draws = np.random.default_rng(0)
    for number in range(COUNT):
        path = folder / "pictures" / f"class{number % 2}" / f"p{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    campaign = {
        "name": "theirs",
        "data": {"source": str(folder / "pictures"), "pictures": COUNT},
        "image_size": 32,
        "patch_size": 8,
        "classes": 2,
        "metrics": ["psnr", "mse"],
        "grids": [
            {
                "models": ["deit_micro"],
                "defences": ["gaussian"],
                "settings": ["a"],
                "attacks": ["patch_embedding", "patch_embedding_wiener", "grey"],
            }
        ],
    }
    prepared = prepare(Campaign.parse(campaign), device="cpu", command="")
    output = OutputFolder(folder / "results")
    output.prepare(fresh=True)
    assert run_campaign(prepared, output, RunProgress(), database="", workers=1, ray="") == 0
    store = output.store()
    return Theirs(folder / "pictures", prepared, store.frame(), store.environments())


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Our board's folder."""
    ledger, _ = ledger_of(OUR_ROWS)
    (tmp_path / "board").mkdir()
    ledger.save(tmp_path / "board")
    return tmp_path / "board"


def add(submission: Submission, ours: Path, **options: Any) -> Submitted:
    path = ours.parent / "entry.json"
    path.write_text(submission.model_dump_json())
    return admit(path, ours, Recomputer(**options))


def test_an_honest_entry_that_is_not_at_224_pixels_is_recomputed_in_part(theirs: Theirs, ours: Path) -> None:
    stated = theirs.submission()
    admitted = add(stated, ours, data=str(theirs.pictures))
    assert read_submitted(ours) == admitted
    assert {(one.check, one.n) for one in admitted.entries} == {("recomputed in part", 10)}
    assert {one.attack: one.adapted for one in admitted.entries if one.defences} == {
        "patch_embedding": False, "patch_embedding_wiener": True, "grey": False,
    }  # fmt: skip
    assert len({tuple(one.scores["psnr"]) for one in admitted.entries}) == 1, "all cells have the same sample"
    for claimed, found in zip(stated.entries, admitted.entries, strict=True):
        assert found.scores["psnr"] == {name: claimed.scores["psnr"][name] for name in found.scores["psnr"]}
    assert {(one.check, one.n) for one in admitted.claims} == {("recomputed in part", COUNT)}
    assert all(one.reason.startswith("10 of 14 pictures recomputed") for one in admitted.claims)


def test_who_runs_all_pictures_again_is_left_no_claim(theirs: Theirs, ours: Path) -> None:
    admitted = add(theirs.submission(), ours, data=str(theirs.pictures), pictures=COUNT)
    assert admitted.claims == ()
    assert {one.check for one in admitted.entries} == {"recomputed"}
    own = board_of(theirs.prepared.plan, theirs.trials, theirs.environments)
    assert [(one.verdict, one.metrics) for one in admitted.entries] == [
        (one.verdict, one.metrics) for one in own.entries
    ]


def leak(name: str, level: float, share: float = 1.0) -> Callable[[pd.DataFrame], None]:
    """Invent what an attack on the defence recovers of a share of the pictures."""

    def change(trials: pd.DataFrame) -> None:
        rows = trials[(trials["attack"] == name) & (trials["defence"] == "gaussian")]
        for place, scores in enumerate(rows["scores"]):
            if place < share * len(rows):
                scores |= {"psnr": level + place / 1000, "mse": 10 ** (-(level + place / 1000) / 10)}

    return change


@pytest.mark.parametrize(
    "change", [leak("patch_embedding_wiener", 4.0), leak("patch_embedding", 100.0), leak("patch_embedding", 4.0, 0.5)]
)
def test_invented_scores_are_refused_with_the_row(
    theirs: Theirs, ours: Path, change: Callable[[pd.DataFrame], None]
) -> None:
    row = r"psnr of picture 'class\d/p\d+.png' is [\d.]+ in the entry, but [\d.]+ recomputed \(rounding: 0\.1 dB\)"
    with pytest.raises(AdmissionError, match=row) as caught:
        add(theirs.submission(change), ours, data=str(theirs.pictures))
    assert "\n" not in str(caught.value)
    assert not (ours / "submitted").exists()


def test_a_picture_that_the_sample_misses_counts_nowhere(
    theirs: Theirs, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = theirs.submission(leak("patch_embedding", 100.0, 1 / COUNT))
    (forged,) = (name for name, value in stated.entries[0].scores["psnr"].items() if value == 100.0)
    for draw in range(40):
        monkeypatch.setattr("secrets.token_hex", lambda _, draw=draw: str(draw))
        try:
            admitted = add(stated, ours, data=str(theirs.pictures))
        except AdmissionError as error:
            assert forged in str(error)  # noqa: PT017
            continue
        break
    assert all(forged not in one.scores["psnr"] for one in admitted.entries)
    assert admitted.entries[0].metrics["psnr"].worst < 100


def test_nobody_knows_before_which_pictures_are_drawn(theirs: Theirs, ours: Path) -> None:
    samples = set()
    for _ in range(3):
        admitted = add(theirs.submission(), ours, data=str(theirs.pictures))
        samples.add(tuple(sorted(admitted.entries[0].scores["psnr"])))
        next((ours / "submitted").iterdir()).unlink()
    assert len(samples) > 1, "of 1,001 samples three were the same"


def test_who_says_that_an_attack_knows_the_defence_has_to_have_one_that_does(theirs: Theirs, ours: Path) -> None:
    stated = theirs.submission()
    values = json.loads(stated.model_dump_json())
    assert (values["entries"][0]["attack"], values["entries"][0]["defence"]) == ("patch_embedding", "gaussian")
    values["entries"][0]["adapted"] = True
    with pytest.raises(
        BadInputError, match=r"adapted is True in the entry, but False here|claims .* but the rules say"
    ):
        add(Submission.read(json.dumps(values)), ours, data=str(theirs.pictures))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recipe": None}, "it holds no recipe; `fedmjp leaderboard pack` writes one"),
        ({"data": ""}, "its pictures ('pictures') are not here: name their folder with --data"),
        ({"pictures": {}}, "its pictures are others than those here: 'class"),
        (
            {"weights": {"deit_micro": "x"}},
            "the trained weights of 'deit_micro' are not here: name them with --weights",
        ),
        (
            {"plug_ins": "halved"},
            "defence 'gaussian' is 'ours' here, with other sources than those of 'third-party' '0.1'",
        ),
    ],
    ids=["recipe", "data", "pictures", "weights", "plug-in"],
)
def test_what_cannot_be_run_again_is_a_claim_with_the_reason(
    theirs: Theirs, ours: Path, change: dict[str, Any], reason: str
) -> None:
    stated, data = theirs.submission(), str(theirs.pictures)
    if "data" in change:
        data = ""
    elif "recipe" in change:
        stated = stated.model_copy(update=change)
    elif "weights" in change:
        prepared = replace(theirs.prepared, plan=with_config(theirs.prepared.plan, change))
        stated = replace(theirs, prepared=prepared).submission()
    else:
        plug_in = PlugIn(kind="defence", name="gaussian", package="third-party", version="0.1", sha256="ab" * 32)
        update = {"plug_ins": (plug_in,)} if "plug_ins" in change else change
        stated = stated.model_copy(update={"recipe": stated.recipe.model_copy(update=update)})
    admitted = add(stated, ours, data=data)
    assert admitted.entries == ()
    assert {one.check for one in admitted.claims} == {"claimed"}
    assert all(one.reason.startswith(reason) for one in admitted.claims), admitted.claims[0].reason
    assert len(admitted.claims) == 4, "attacks alone"


def with_config(plan: TrialPlan, change: Mapping[str, Any]) -> TrialPlan:
    import hashlib

    config = {**plan.about["config"], **change}
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return replace(plan, about={**plan.about, "config": config, "config_sha256": sha256})


def test_a_name_that_boards_refuse_is_refused_when_it_is_packed(theirs: Theirs) -> None:
    entries = board_of(theirs.prepared.plan, theirs.trials, theirs.environments).entries
    with pytest.raises(BadInputError, match="submitter: the name 'a<b' holds '<'"):
        pack_entries(theirs.prepared.plan, entries, AUTHOR.model_copy(update={"name": "a<b"}))


def test_a_recipe_of_another_campaign_is_refused(theirs: Theirs, ours: Path) -> None:
    stated = theirs.submission()
    recipe = stated.recipe.model_copy(update={"config": {**stated.recipe.config, "seeds": [1]}})
    with pytest.raises(
        AdmissionError, match=r"its config_sha256 is [0-9a-f]{64}, but its recipe has [0-9a-f]{64}: pack"
    ):
        add(stated.model_copy(update={"recipe": recipe}), ours, data=str(theirs.pictures))


def both_boards(check: str, level: float) -> tuple[Board, Board]:
    """Our board alone, and with a third party's cells of a defence that we have and of one that we have not."""
    plan, trials = ledger_of(OUR_ROWS)
    cells = [cell("gradient_matching", defence, model="deit_tiny") for defence in ("mjp", "sign")]
    rows = (
        *(Row(attacked, near(level), adapted=True) for attacked in cells),
        grey("sign", model="deit_tiny"),
        Row(cell("gradient_matching", "none", model="deit_tiny"), near(150)),
        grey("none", model="deit_tiny"),
    )  # fmt: skip
    submitted = [
        entry.model_copy(update={"origin": "submitted", "submitter": AUTHOR, "check": check, "id": f"theirs{entry.id}"})
        for entry in board(*rows, name="theirs").entries
    ]
    return board_of(plan, trials, ENVIRONMENTS), board_of(plan, trials, ENVIRONMENTS, submitted=submitted)


@pytest.mark.parametrize("check", ["recomputed", "recomputed in part"])
@pytest.mark.parametrize("level", [12.52, 100.0])
def test_third_parties_take_neither_headline_nor_key_figures_nor_the_sites_sentence(check: str, level: float) -> None:
    ours, both = both_boards(check, level)
    alone, beside = Report(ours), Report(both)
    assert front.sentence(both, beside.matrix) == front.sentence(ours, alone.matrix)
    assert front.select_key_entries(beside.matrix) == front.select_key_entries(alone.matrix)
    assert StrongestAttacks.select_for_board(both) == StrongestAttacks.select_for_board(ours)
    assert StrongestAttacks.select(both.entries) == StrongestAttacks.select(ours.entries)
    assert [section.findings for section in beside.sections] == [section.findings for section in alone.sections]
    assert list_findings(both, ours.standings) == list_findings(ours, ours.standings)
    rows = {row.defence for row in beside.matrix.rows} - {row.defence for row in alone.matrix.rows}
    assert rows
    assert all(row.endswith(f", submitted by B. Author, {check}") for row in rows)
    shown = page(beside, None, {}, ())
    assert shown.count(f"submitted by B. Author, {check}") > len(rows), "in the table of all results, too"


def test_ranks_are_for_what_was_recomputed_on_all_of_the_boards_pictures_and_is_not_there_yet() -> None:
    ranks = {}
    for check in ("recomputed", "recomputed in part"):
        _, both = both_boards(check, 30.0)
        ranks[check] = {one.defence for one in both.standings if one.origin == "submitted" and one.rank}
    assert ranks == {"recomputed": {"sign"}, "recomputed in part": set()}


def test_claims_have_a_table_of_their_own_and_are_escaped(ours: Path, theirs: Theirs) -> None:
    claims = add(theirs.submission().model_copy(update={"recipe": None}), ours).claims
    plan, trials = ledger_of(OUR_ROWS)
    hostile = claims[0].model_copy(update={"attack": "<img src=x onerror=alert(1)>"})
    shown = page(Report(board_of(plan, trials, ENVIRONMENTS, claims=[*claims, hostile])), None, {}, ())
    before, table = shown.split('<h2 id="claims">')
    assert "B. Author" not in before
    assert table.count("B. Author") == len(claims) + 1
    assert "<img src=x" not in shown
