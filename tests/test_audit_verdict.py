import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedmjp.benchmarks.audit import audit as auditing
from fedmjp.benchmarks.audit.advice import BOARD, NO_DEFENCE, actions
from fedmjp.benchmarks.audit.answers import unanswered
from fedmjp.benchmarks.audit.audit import Findings
from fedmjp.benchmarks.audit.report import PAGE, SUMMARY, write_report
from fedmjp.benchmarks.audit.verbatim import find_one_per_record
from fedmjp.benchmarks.audit.verdict import answers, exit_code, first_line, judge_cheating, judge_honest, verdict
from fedmjp.cli import app
from fedmjp.errors import AppError, FederationError

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = {"attack": "patch_embedding", "role": "attack", "reveals": "pictures"}
UPLOAD = {
    **PICTURE, "upload": "client 1, round 1", "pictures": 8, "above_floor": 0, "psnr_worst_case": 18.0,
    "psnr_median": 9.0, "floor_median": 11.0, "floor_of_best": 17.7,
}  # fmt: skip
LEVEL = {
    "kind": "pictures", "attack": "patch_embedding", "came_back": 1, "of": 1, "best": 107.0, "floor": 11.0, "unit": "dB"
}  # fmt: skip
OF_FEATURES = {
    **LEVEL,
    "kind": "features",
    "attack": "linear_inputs",
    "best": 6e-9,
    "floor": 1.0,
    "unit": "relative error",
}
CONTROL = {"made": True, "rows": [], "leaks": ["pictures"], "network_read": True, "levels": [LEVEL]}
EASIER = {
    "pictures": 4, "steps": 1, "labels_right": 1.0, "membership_auc": None, "best": 0.8, "unit": "relative error",
    "kind": "features", "came_back": 0, "of": 4, "attacks": ["linear_inputs"],
}  # fmt: skip
SINGLE = {**EASIER, "pictures": 1, "of": 1, "best": 1e-7, "came_back": 1}
FISHING = {"server": "class_fishing", "played": True, "leaks": True, "psnr": 114.2, "floor": 11.0, "said": "a picture"}
LEAK = {"what": "an upload is of one example alone", "evidence": "by rule"}


def report_of(**values: Any) -> dict[str, Any]:
    """Write down the report of an app whose uploads of eight pictures gave nothing back."""
    return {
        "app": "hospital", "clients": 2, "rounds": 2, "stand_ins": [], "problem": None, "run_config": [], "leaks": [],
        "recovered": [UPLOAD], "attacks": [], "cheating": [], "protections": [], "departures": [], "refused": [],
        "recipe": {"trains": False, "why": "no hook saw it"}, "control": CONTROL, "unusual": [], "not_tested": [],
        "leaves": [], "server_controls": [], "taken_off": None, "advice": None, "counterfactual": [],
        "step": {"steps": 3, "pictures": 8, "passes": 1.0, "batch_size": 8, "optimiser": "SGD"},
        **unanswered(), **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "outcome", "said"),
    [
        ({}, "HOLDS", "No picture came back: best 18.0 dB; a blank guess gets 17.7 (patch_embedding)."),
        ({"leaks": [LEAK]}, "LEAKS", "one example alone"),
        ({"leaks": [LEAK], "problem": "the app hangs"}, "LEAKS", "one example alone"),
        ({"problem": "the app hangs"}, "UNKNOWN", "the app hangs"),
        ({"control": None}, "UNKNOWN", "no hook saw it"),
        ({"control": {"made": False, "reason": "it takes no pictures", "leaks": []}}, "UNKNOWN", "takes no pictures"),
        ({"control": {**CONTROL, "network_read": False}}, "UNKNOWN", "do not read this network"),
        ({"recovered": []}, "UNKNOWN", "No attack on records applies"),
        ({"refused": ["3 steps of Adam"]}, "UNKNOWN", "3 steps of Adam"),
        ({"departures": ["other weights were mixed in"]}, "UNKNOWN", "other weights were mixed in"),
        ({"refused": ["3 steps of Adam"], "protections": [{"drowns": True}]}, "HOLDS", "Fresh noise"),
        (
            {"recovered": [], "records": {**unanswered()["records"], "came_back": 3, "of": 8, "kind": "rows",
              "attack": "linear_inputs", "best": 1e-7, "floor": 1.0, "unit": "relative error"}},
            "LEAKS", "3 of 8 rows came back: best relative error 1e-07; a blank guess gets 1 (linear_inputs).",
        ),
    ],
)  # fmt: skip
def test_the_policy_holds_only_where_an_attack_that_works_got_nothing(
    values: dict[str, Any], outcome: str, said: str
) -> None:
    report = report_of(**values)
    honest = judge_honest(report)
    assert honest.outcome == outcome
    assert said in honest.said
    assert exit_code(report) == {"HOLDS": 0, "LEAKS": 1, "UNKNOWN": 2}[outcome]


def test_no_record_comes_back_only_where_the_same_attack_reads_the_control() -> None:
    features = {**unanswered()["records"], "of": 32, "kind": "features", "attack": "linear_inputs", "best": 0.84,
                "floor": 1.0, "unit": "relative error"}  # fmt: skip
    row = {**UPLOAD, "attack": "linear_inputs", "reveals": "features", "features": 32, "features_near": 0}
    report = report_of(recovered=[row], records=features, control={**CONTROL, "levels": [OF_FEATURES]})
    answer = answers({**report, "counterfactual": [SINGLE, EASIER]})[2]
    assert answer.answer == "No"
    assert answer.said == (
        "No feature came back: best relative error 0.84; a blank guess gets 1 (linear_inputs). The control, one known "
        "record without a defence, came back, its features alone: best relative error 6e-09; a blank guess gets 1 "
        "(linear_inputs). A smaller update, of the app's own step, gives back: 1 of 1 feature with 1 record in one "
        "step; none with 4 records in one step."
    )
    other_attack = answers({**report, "control": CONTROL})[2]
    assert other_attack.answer == "Not known"
    assert "nothing out of the undefended control" in other_attack.said
    partly = {**report, "recovered": [{**row, "features_near": 3}], "records": {**features, "came_back": 3}}
    assert answers(partly)[2].answer == "In part"


@pytest.mark.parametrize(
    ("curve", "word"),
    [
        ([SINGLE, EASIER], "No"),
        ([SINGLE, EASIER, {**EASIER, "pictures": 8, "came_back": 1}], "Not known"),  # a harder one gave something
        ([SINGLE, {**EASIER, "pictures": 16}], "Not known"),  # of more records than the app's own step
        ([SINGLE, {**EASIER, "attacks": ["labels"], "came_back": None}], "Not known"),
        ([], "Not known"),
    ],
)
def test_an_update_that_no_attack_reads_is_judged_by_easier_ones_of_the_apps_own(
    curve: list[dict[str, Any]], word: str
) -> None:
    control = {**CONTROL, "levels": [OF_FEATURES]}
    report = report_of(recovered=[], refused=["3 steps of Adam"], control=control, counterfactual=curve)
    answer = answers(report)[2]
    assert answer.answer == word
    assert ("No feature came back even of 4 records in 1 step" if word == "No" else "3 steps of Adam") in answer.said


@pytest.mark.parametrize(
    ("values", "outcome", "said"),
    [
        ({"cheating": [FISHING]}, "LEAKS", "class_fishing"),
        ({"cheating": [{**FISHING, "unlike": "it met none of the app's mods"}]}, "UNKNOWN", "none of the app's mods"),
        ({"cheating": [{**FISHING, "leaks": False}]}, "UNKNOWN", "no evidence of protection"),
        ({"cheating": [{**FISHING, "leaks": False, "is_stopped": True}]}, "HOLDS", "class_fishing"),
        ({"cheating": [{"server": "a", "played": False, "said": "no transformer"}]}, "UNKNOWN", "no transformer"),
        ({"leaks": [LEAK]}, "LEAKS", "what an honest one gets"),
    ],
)
def test_a_cheating_server_has_a_verdict_of_its_own(values: dict[str, Any], outcome: str, said: str) -> None:
    cheating = judge_cheating(report_of(**values))
    assert cheating.outcome == outcome
    assert said in cheating.said


def test_tokens_that_come_back_are_said_though_no_attack_reads_the_steps() -> None:
    row = {
        "attack": "embedding_rows", "role": "attack", "reveals": "tokens", "upload": "client 1, round 1",
        "kind": "tokens", "tokens": 18, "tokens_named": 18, "tokens_right": 18, "tokens_floor": 0.0006,
        "vocabulary": 30_000,
    }  # fmt: skip
    records = {
        **unanswered()["records"], "came_back": 18, "of": 18, "attack": "embedding_rows", "kind": "tokens", "best": 1.0,
        "floor": 0.0006, "unit": "share right",
    }  # fmt: skip
    of_adam = report_of(recovered=[row], records=records, refused=["4 steps of AdamW are no sum of gradients"])
    of_adam["control"] = {**CONTROL, "levels": [{**LEVEL, "kind": "tokens"}]}
    for report in (of_adam, report_of(recovered=[row], records=records, control={**CONTROL, "network_read": False})):
        _, _, question = answers(report)
        assert question.answer == "In part"
        assert question.said.count("18 of the 18 different tokens") + question.said.count("18 of 18 tokens") == 1


@pytest.mark.parametrize(
    ("named", "right", "held", "classes", "updates", "answer"),
    [
        (2, 2, 3, 4, 1, "Not known"),  # half of all pairs are of the three: C(3, 2) / C(4, 2)
        (1, 1, 2, 2, 1, "Not known"),
        (5, 5, 5, 10, 1, "Yes"),  # 1 of 252
        (2, 2, 2, 10, 2, "Yes"),  # 1 of 45, twice: .044
        (2, 2, 2, 10, 3, "Not known"),  # thrice: .067
    ],
)
def test_classes_are_told_where_chance_does_not_explain_them(
    named: int, right: int, held: int, classes: int, updates: int, answer: str
) -> None:
    row = {
        "attack": "classes", "role": "attack", "reveals": "classes", "upload": "client 1, round 1", "named": named,
        "right": right, "held": held, "classes": classes,
    }  # fmt: skip
    assert answers(report_of(recovered=[row] * updates))[0].answer == answer


def test_both_servers_stand_first_and_the_floor_beside_the_figure() -> None:
    lines = verdict(report_of(cheating=[FISHING]))
    assert lines[0].startswith("Honest server: HOLDS. No picture came back")
    assert lines[1].startswith("Cheating server: LEAKS. With class_fishing")


def test_three_questions_have_three_answers_and_say_why_not() -> None:
    labels = {
        "answered": True, "why": None, "right": 0.9, "guess": 0.3, "interval": [0.8, 0.95], "examples": 32,
        "classes": 10, "attack": "labels", "batch_norm": None,
    }  # fmt: skip
    membership = {
        **unanswered()["membership"], "answered": True, "auc": 0.6, "interval": [0.45, 0.74], "members": 32,
        "others": 30, "tpr_at_1_percent": [0.1, 0.02, 0.3],
    }  # fmt: skip
    given = answers(report_of(labels=labels, membership=membership))
    assert [answer.answer for answer in given] == ["Yes", "Not known", "No"]
    assert "90% (80% to 95%) of 32 labels" in given[0].said
    assert "a guess gets 30%" in given[0].said
    assert "60% (45% to 74%)" in given[1].said
    assert "10% (2% to 30%)" in given[1].said
    near = answers(report_of(membership={**membership, "auc": 0.5, "interval": [0.42, 0.58]}))
    assert near[1].answer == "No"
    refused = answers(report_of(membership={**unanswered()["membership"], "why": "its loss is not known"}))
    assert refused[1] == ("Who was in the data?", "Not known", "Its loss is not known.")


@pytest.mark.parametrize(
    ("kind", "shape", "sent", "named"),
    [
        ("query", [129], [], True),
        ("query.survival", [129, 3], [], True),
        ("train", [129], [], True),
        ("train", [129, 8], [], False),  # a layer of an update, whose server sent none
        ("train", [129], [129], False),
        ("query", [130], [], False),
        ("query", [], [], False),
    ],
)
def test_an_array_with_a_row_for_each_record_is_named_in_every_message(
    kind: str, shape: list[int], sent: list[int], named: bool
) -> None:
    answer = {
        "type": kind,
        "records": {
            "survival-data": {"kind": "arrays", "entries": {"T": ["float64", shape, 1160]}},
            "metrics": {"kind": "metrics", "values": {"num-examples": 129, "loss": 129.0}},
        },
    }
    question = {"records": {"arrays": {"kind": "arrays", "entries": {"w": ["float64", sent, 1160]}}} if sent else {}}
    expected = [("survival-data", "T", "the same answer counts, num-examples = 129")] if named else []
    assert list(find_one_per_record(answer, question)) == expected
    if kind.startswith("query") and shape and shape[0] == 129:  # as many as enter a network, which nothing counts
        del answer["records"]["metrics"]
        assert [name for _, name, _ in find_one_per_record(answer, question, 129)] == ["T"]
        answer["records"]["survival-data"]["entries"]["E"] = ["float64", [8], 64]  # several arrays may be weights
        assert not list(find_one_per_record(answer, question, 129))


def test_an_app_that_broke_is_not_said_to_have_used_its_own_data() -> None:
    assert "were used" not in first_line(report_of(problem="the app needs the network"))
    assert "were used" in first_line(report_of())


@pytest.mark.parametrize(("error", "said"), [(ZeroDivisionError("a\nb"), "the audit itself failed"),
                                            (FederationError("no SuperLink"), "no SuperLink")])  # fmt: skip
def test_a_failure_of_the_audit_is_one_line_and_never_the_exit_code_of_a_leak(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Findings:
        raise error

    monkeypatch.setattr(auditing, "audit", fail)
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "app"), "--no-sandbox", "--output", str(tmp_path / "out")])
    assert isinstance(done.exception, AppError)
    assert done.exception.exit_code == 2
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def board_rows() -> dict[str, tuple[str, str]]:
    """Read what one gradient of 16 tokens gives, and Top-1, from the published tables by defence."""
    board = (RESULTS / "defences" / "README.md").read_text().partition("## Pictures: 16 tokens")[2].partition("## ")[0]
    costs = (RESULTS / "training_cost" / "README.md").read_text()
    top1 = dict(re.findall(r"(?m)^\| `([^`]+)` \| ([\d.]+) \(", costs))
    rows = {}
    for names, recovered in re.findall(r"(?m)^\| (`.+?`) \| ([^|]+) \|", board):
        for name in re.findall(r"`([^`]+)`", names):
            rows[name] = (recovered, top1.get(name, ""))
    return rows


def test_what_would_help_is_what_the_published_board_says() -> None:
    published = board_rows()
    for row in (NO_DEFENCE, *BOARD):
        assert published[row.defence] == (row.recovered, "" if row.top1 is None else f"{row.top1}")
    assert BOARD[0].defence == "local_dp"


def test_what_to_switch_on_follows_the_verdicts() -> None:
    assert "local_dp" in actions(report_of(leaks=[LEAK]), "LEAKS", "LEAKS")[0]
    assert "Take the values" in actions(report_of(leaks=[{**LEAK, "in_clear": True}]), "LEAKS", "LEAKS")[0]
    assert "local_dp" in actions(report_of(), "UNKNOWN", "UNKNOWN")[0]
    assert "need nothing more" in actions(report_of(), "HOLDS", "LEAKS")[0]


def test_the_first_screen_says_who_when_and_what_to_do(tmp_path: Path) -> None:
    pair = [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]
    report = report_of(cheating=[FISHING], counterfactual=[SINGLE])
    write_report(Findings(report, strips=[("control", pair), ("client 1", pair)]), tmp_path, command="fedmjp audit APP")
    for name in (PAGE, SUMMARY):
        page = (tmp_path / name).read_text()
        first_screen = page.partition("Policy:")[0]
        for said in (
            "Which labels?", "Who was in the data?", "Do records come back?", "hospital", "fedmjp ", "Cheating server",
            "What to switch on, and what it costs", "One update is 3 steps of SGD",
        ):  # fmt: skip
            assert said in first_screen
        assert first_screen.count("<figure>") == 1
