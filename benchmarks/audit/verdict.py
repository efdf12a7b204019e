"""What an audit comes to, in sentences: against the policy, and never more than was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmjp.benchmarks.audit.wording import result

POLICY = (
    "No private example leaves as it is. No picture comes back better than its mean colour by more than 3 dB. "
    "No upload is of one example alone, unless noise that was measured is nearly all of it. Labels and features that "
    "come back are reported and break no policy."
)
HOLDS, LEAKS, UNKNOWN = 0, 1, 2


def unanswered() -> dict[str, Any]:
    """Return the keys of the three questions as they are before anything was attacked."""
    return {
        "labels": {
            "answered": False, "why": None, "right": None, "guess": None, "interval": None, "examples": None,
            "classes": None, "attack": None, "batch_norm": None,
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


def exit_code(report: Mapping[str, Any]) -> int:
    """Return 0 where the policy holds, 1 where something leaks against it, 2 where nobody can tell.

    Nobody can where the app was not seen to the end, where attacks do not work on its network without a defence, or
    where an update is not what they take it for.

    Args:
        report: As ``report.json`` holds it.
    """
    if report["problem"]:
        return UNKNOWN
    if report["leaks"]:
        return LEAKS
    return HOLDS if "pictures" in _control(report)["leaks"] and not report["departures"] else UNKNOWN


def first_line(report: Mapping[str, Any]) -> str:
    """State in the first line of every report what stood in, or that nothing did.

    Args:
        report: As ``report.json`` holds it.
    """
    replaced = report["stand_ins"]
    if not replaced:
        return "Nothing stood in: the app's own data and weights were used."
    replacements = "; ".join(
        f"{stand_in['instead']} in place of {stand_in['what']} {stand_in['name']}" for stand_in in replaced
    )
    return f"Stand-ins were used, so steps, batches and weights are not those of the deployment: {replacements}."


def verdict(report: Mapping[str, Any]) -> list[str]:
    """Sum up the audit in a few sentences, the most important first.

    Args:
        report: As ``report.json`` holds it.
    """
    sentences = []
    if report["problem"]:
        sentences.append(
            f"The app could not be seen to the end: {report['problem']}. What was seen until then follows."
        )
    leaks: Sequence[Mapping[str, str]] = report["leaks"]
    if leaks:
        sentences.append("Uploads of this app give private data away, against the policy.")
        sentences += [f"{leak['what'][0].upper()}{leak['what'][1:]} ({leak['evidence']})." for leak in leaks[:5]]
        if len(leaks) > 5:
            sentences.append(f"{len(leaks) - 5} more stand in the report.")
        return [*sentences, *_besides(report)]
    if report["problem"]:
        return sentences
    return [*sentences, _of_pictures(report), *_besides(report)]


def _of_pictures(report: Mapping[str, Any]) -> str:
    control = _control(report)
    ran = [row for row in _attacks(report) if row["reveals"] == "pictures"]
    if not control["made"]:
        return f"Nothing is known of pictures or texts: {control['reason']}. That is no evidence of protection."
    if "pictures" not in control["leaks"]:
        return (
            "Nothing is known of pictures: no attack here reads them out of this network, not even from the "
            "undefended gradient of one known picture. That is no evidence of protection."
        )
    strongest = max(row["psnr_worst_case"] for row in control["rows"] if row["reveals"] == "pictures")
    undefended = f"the undefended gradient of one known picture of the same network gives it back at {strongest} dB"
    if ran:
        best = max(row["psnr_worst_case"] for row in ran)
        sentence = (
            f"No attack recovered more than the floor: at most {best} dB from what the app sends, while {undefended}."
        )
        departures = "; ".join(report["departures"])
        return f"{sentence} But {departures}. So that is no evidence of protection." if departures else sentence
    reasons = [row["reason"] for row in report["attacks"] if not row["applies"] and row["attack"] == "patch_embedding"]
    return f"No attack on pictures applies to what the app sends ({(reasons or ['see below'])[0]}), while {undefended}."


def _control(report: Mapping[str, Any]) -> Mapping[str, Any]:
    why = f"nothing was attacked, {report['recipe'].get('why', 'as said below')}"
    control: Mapping[str, Any] = report["control"] or {"made": False, "reason": why, "leaks": []}
    return control


def _attacks(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in report["recovered"] if row["role"] == "attack"]


def _besides(report: Mapping[str, Any]) -> list[str]:
    classes = [row for row in _attacks(report) if row["reveals"] == "classes"]
    labels = [row for row in _attacks(report) if "labels_right" in row]
    features = [row for row in _attacks(report) if row.get("features_near")]
    cheats = [row for row in report["cheating"] if row.get("leaks")]
    failed = [row for row in report["protections"] if row["verified"] == "no"]
    sentences = [f"{row['protection'].capitalize()}: {row['said']}" for row in failed]
    if cheats:
        row = max(cheats, key=lambda entry: entry["psnr"])
        sentences.append(f"A server that changes weights gets more: with {row['server']}, {row['said']}.")
    if classes:
        row = max(classes, key=lambda entry: (entry["right"], -entry["named"]))
        sentences.append(f"Which classes a client holds shows in the head's bias: {result(row)}.")
    if labels:
        row = max(labels, key=lambda entry: entry["labels_right"])
        sentences.append(f"Labels come back ({row['attack']}): {result({**row, 'reveals': 'labels'})}.")
    if features and not labels:
        row = max(features, key=lambda entry: entry["features_near"])
        sentences.append(f"Features come back ({row['attack']}): {result(row)}.")
    return sentences
