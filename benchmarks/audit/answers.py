"""The three questions of an audit (labels, membership, records): their keys in the report, and answers in words."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from scipy.stats import hypergeom

from fedmjp.benchmarks.audit.intervals import LEVEL, rate_interval
from fedmjp.benchmarks.audit.wording import result

Word = Literal["Yes", "In part", "No", "Not known"]
NEAR = 0.1  # an interval that ends no further above a guess shows that little more than the guess is told


class QuestionAnswer(NamedTuple):
    """One of the three questions, answered in a word and in a sentence."""

    question: str
    answer: Word
    said: str


def unanswered() -> dict[str, Any]:
    """Return the keys of the three questions as they are before anything was attacked."""
    return {
        "labels": {
            "answered": False, "why": None, "right": None, "guess": None, "interval": None, "examples": None,
            "classes": None, "attack": None, "batch_norm": None, "targets_are_inputs": False, "control": None,
        },
        "membership": {
            "answered": False, "why": None, "auc": None, "interval": None, "members": 0, "others": 0,
            "tpr_at_1_percent": None, "tpr_at_01_percent": None, "score": None, "control_auc": None,
            "other_client_auc": None, "caveats": [],
        },
        "records": {
            "came_back": 0, "of": 0, "attack": None, "kind": "pictures", "best": None, "floor": None, "unit": "dB",
            "why": None,
        },
    }  # fmt: skip


def find_records(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is known of records that came back: the best attack that was run on what the app sent.

    Args:
        report: As ``report.json`` holds it.
    """
    records: Mapping[str, Any] = {**unanswered()["records"], **(report.get("records") or {})}
    pictures = [row for row in attack_rows(report) if row["reveals"] == "pictures"]
    if records["attack"] or not pictures:
        return records
    best = max(pictures, key=lambda row: (row.get("above_floor", 0), row["psnr_worst_case"]))
    return {
        **records,
        "came_back": best.get("above_floor", 0),
        "of": best.get("pictures", 1),
        "attack": best["attack"],
        "best": best["psnr_worst_case"],
        "floor": best.get("floor_of_best", best.get("floor_median")),
    }


def answer_labels(report: Mapping[str, Any]) -> QuestionAnswer:
    """Answer which labels a client trained on: right ones beside a guess, or classes that show.

    Args:
        report: As ``report.json`` holds it.
    """
    question = "Which labels?"
    if not report["recipe"].get("is_asked_to_train", True):
        sentence = "No client is asked to train a network, so there are no labels of a training to read."
        return QuestionAnswer(question, "No", sentence)
    labels = {**unanswered()["labels"], **(report.get("labels") or {})}
    rows = [row for row in attack_rows(report) if "labels_right" in row]
    classes = [row for row in attack_rows(report) if row["reveals"] == "classes"]
    also = f" {labels['batch_norm']}" if labels["batch_norm"] else ""
    if labels["targets_are_inputs"]:
        sentence = "There are none: the app's loss compares with the inputs themselves, as an autoencoder's does."
        return QuestionAnswer(question, "No", sentence + also)
    if not labels["answered"] and rows and labels["right"] is None:
        row = max(rows, key=lambda entry: entry["labels_right"])
        labels |= {
            "answered": True, "right": row["labels_right"], "guess": row["labels_floor"], "examples": row["labels"],
            "attack": row["attack"],
        }  # fmt: skip
    if labels["answered"]:
        right, guess = labels["right"], labels["guess"] or 0.0
        count = f" of {labels['examples']}" if labels["examples"] else ""
        examples = labels["examples"] or 1
        interval = labels["interval"] or rate_interval(round(right * examples), examples)
        sentence = (
            f"{right:.0%}{_interval(labels['interval'])}{count} labels were read by {labels['attack']}; "
            f"a guess gets {guess:.0%}."
        )
        if control := labels["control"]:
            sentence += (
                f" From the app's own steps without defence the same attack reads {control['right']:.0%} of "
                f"{control['examples']} known labels, three in four of one class (a guess: {control['guess']:.0%})."
            )
        return QuestionAnswer(question, _beside(guess, interval), sentence + also)
    if classes:
        row = min(classes, key=_chance_of_classes)
        chance = min(1.0, _chance_of_classes(row) * len(classes))
        sentence = (
            f"Of classes that a client holds the last layer's bias may tell: {result(row)} (by chance so many or more: "
            f"p = {chance:.2g} over {len(classes)} updates)."
        )
        return QuestionAnswer(question, "Yes" if chance < 1 - LEVEL else "Not known", sentence + also)
    return QuestionAnswer(question, "Not known", f"{_because(labels['why'], report)}{also}")


def answer_membership(report: Mapping[str, Any]) -> QuestionAnswer:
    """Answer whether a record's membership can be told, beside a coin.

    Args:
        report: As ``report.json`` holds it.
    """
    question = "Who was in the data?"
    if not report["recipe"].get("is_asked_to_train", True) and any(leak.get("in_clear") for leak in report["leaks"]):
        sentence = "What leaves holds numbers of each record (by rule): whoever knows a record looks it up there."
        return QuestionAnswer(question, "Yes", f"{sentence} No network is trained, so no score of records was tried.")
    membership = {**unanswered()["membership"], **(report.get("membership") or {})}
    if not membership["answered"]:
        return QuestionAnswer(question, "Not known", _because(membership["why"], report))
    interval = membership["interval"]
    sentence = (
        f"Of a record in the data and one that is not, the right one is picked in {membership['auc']:.0%}"
        f"{_interval(interval)} of cases; a coin gets 50 % ({membership['members']} members, "
        f"{membership['others']} others)."
    )
    for rate, key in (("1", "tpr_at_1_percent"), (".1", "tpr_at_01_percent")):
        if membership[key]:
            member_share, *interval_of_share = membership[key]
            sentence += (
                f" At {rate} % false alarms {member_share:.0%}{_interval(interval_of_share)} of members are found."
            )
    control = membership["control_auc"]
    if control is not None:
        sentence += f" The control, an update of known members, gives {control:.0%}."
    word = _beside(0.5, interval or [membership["auc"]] * 2)
    return QuestionAnswer(question, word, " ".join([sentence, *membership["caveats"]]))


def _beside(guess: float, interval: Sequence[float]) -> Word:
    """Answer by where an interval lies: above a guess, near it or below, or too wide to tell."""
    low, high = interval
    if low > guess:
        return "Yes"
    return "No" if high <= guess + NEAR else "Not known"


def _chance_of_classes(row: Mapping[str, Any]) -> float:
    """Compute the probability that as many classes, named at random, hold so many right ones (hypergeometric)."""
    return float(hypergeom.sf(row["right"] - 1, row["classes"], row["held"], row["named"]))


def _because(why: str | None, report: Mapping[str, Any]) -> str:
    reason = why or report["problem"] or (None if report["recipe"].get("trains", True) else report["recipe"]["why"])
    return f"{reason[0].upper()}{reason[1:]}." if reason else "This was not tried."


def _interval(interval: Sequence[float] | None) -> str:
    return f" ({interval[0]:.0%} to {interval[1]:.0%})" if interval else ""


def attack_rows(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List what attacks recovered, without guesses.

    Args:
        report: As ``report.json`` holds it.
    """
    return [row for row in report["recovered"] if row["role"] == "attack"]
