"""What an audit comes to: one verdict for each server, and one answer to each of three questions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedmjp.benchmarks.audit.answers import (
    QuestionAnswer,
    Word,
    answer_labels,
    answer_membership,
    attack_rows,
    find_records,
)
from fedmjp.benchmarks.audit.wording import count_of, describe_curve, figure, result

POLICY = (
    "No private record leaves as it is, nor an array with a row for each. No picture comes back better than its mean "
    "colour by more than 3 dB, and no other record as it was. No upload is of one example alone, unless noise that was "
    "measured is nearly all of it. Labels, features, tokens without their order and membership that come back are "
    "reported and break no policy."
)
Outcome = Literal["HOLDS", "LEAKS", "UNKNOWN"]
EXIT_CODES: Mapping[Outcome, int] = {"HOLDS": 0, "LEAKS": 1, "UNKNOWN": 2}
NOUNS = {"pictures": "picture", "rows": "record", "features": "feature", "tokens": "token"}
IN_PART = ("features", "tokens")  # what comes back of records that are not whole
NOT_ATTACKED = "nothing was attacked"


class ServerVerdict(NamedTuple):
    """What became of the policy with one kind of server."""

    server: str
    outcome: Outcome
    said: str

    @property
    def line(self) -> str:
        """Return the verdict as one line."""
        return f"{self.server}: {self.outcome}. {self.said}"


def exit_code(report: Mapping[str, Any]) -> int:
    """Return the exit code, which follows the honest server: 0 the policy holds, 1 something leaks, 2 nobody can tell.

    Args:
        report: As ``report.json`` holds it.
    """
    return EXIT_CODES[judge_honest(report).outcome]


def judge_honest(report: Mapping[str, Any]) -> ServerVerdict:
    """Judge what a server gets that keeps to the protocol and looks at what it was sent.

    Something leaks where private data was found, whatever became of the run afterwards. The policy holds where an
    attack on records was run on what the app sent, or on the app's own step with fewer steps or records, gave nothing
    back, and gets the same (a record, or its features) out of this very network without a defence; or where fresh noise
    was measured that is nearly all of an upload. In every other case nobody can tell: the app was not seen to the end,
    attacks refuse its updates or were not run, they fail on the undefended control too, or the update is not what they
    take it for. That attacks refuse an update is no protection.

    Args:
        report: As ``report.json`` holds it.
    """
    server, leaks = "Honest server", report["leaks"]
    if leaks:
        more = f" {len(leaks) - 1} more in the report." if len(leaks) > 1 else ""
        finding = str(leaks[0]["what"])
        return ServerVerdict(server, "LEAKS", f"{finding[0].upper()}{finding[1:]} ({leaks[0]['evidence']}).{more}")
    records = find_records(report)
    if records["came_back"] and records["kind"] not in IN_PART:
        return ServerVerdict(server, "LEAKS", _of_records(records))
    if report["problem"]:
        return ServerVerdict(server, "UNKNOWN", f"The app could not be seen to the end: {report['problem']}.")
    if any(row.get("drowns") for row in report["protections"]):
        sentence = (
            "Fresh noise that was measured is nearly all of an upload. Unless it is drawn in whole numbers, it may "
            "still tell which of some candidates is behind an upload (results/dp_audit), and that was not tested"
        )
        return ServerVerdict(
            server, "HOLDS", f"{sentence}. {_of_records(records)}" if records["attack"] else f"{sentence}."
        )
    said = _of_app(report, records)
    if gap := _evidence_gap(report, records, said):
        return ServerVerdict(server, "UNKNOWN", f"{gap} That is no evidence of protection.")
    sentences = [said, _of_control(report), describe_curve(report["counterfactual"])]
    return ServerVerdict(server, "HOLDS", " ".join(sentence for sentence in sentences if sentence))


def _evidence_gap(report: Mapping[str, Any], records: Mapping[str, Any], said: str | None) -> str | None:
    """Explain what is missing before anybody could say that nothing leaks; None if nothing is."""
    control = report["control"]
    if control is None:
        return f"{NOT_ATTACKED.capitalize()}: {_why_not_attacked(report)}."
    if said is None and (refused := report.get("refused")):
        return f"No attack reads what the app sends: {refused[0]}."
    if not control["made"]:
        return f"Nothing is known of records: {control.get('reason') or 'no control could be made'}."
    if not control["network_read"]:
        return (
            "Our attacks do not read this network: they get no record out of it, not even from the undefended update "
            "of a known one."
        )
    if said is None and records["attack"]:
        return f"{_of_records(records)} But {records['attack']} gets nothing out of the undefended control either."
    if said is None:
        reasons = [row["reason"] for row in report["attacks"] if not row["applies"] and row["role"] == "attack"]
        return f"No attack on records applies to what the app sends: {records['why'] or (reasons or ['see below'])[0]}."
    if departures := report["departures"]:
        return f"{said} But {'; '.join(departures)}."
    return None


def _of_app(report: Mapping[str, Any], records: Mapping[str, Any]) -> str | None:
    """State what attacks that read the control got of the app's own step; None where none of them ran on it.

    The step with fewer steps or records counts, as long as nothing came back of any step between it and the app's own.
    """
    control, step = report["control"] or {}, report["step"]
    able = {level["attack"] for level in control.get("levels", ())}
    ran = {row["attack"] for row in attack_rows(report)}
    if records["attack"] and (able & ran or records["came_back"]) and not report.get("refused"):
        return _of_records(records)
    rows = [row for row in report["counterfactual"] if step and _is_easier(row, step)]
    for row in sorted(rows, key=lambda row: row["pictures"] * row["steps"]):
        harder = [other for other in rows if _is_easier(row, other) or other is row]
        if able & set(row["attacks"]) and not any(other["came_back"] for other in harder):
            best = figure(row["best"], None if row["unit"] == "dB" else 1.0, row["unit"])
            size = f"{count_of(row['pictures'], 'record')} in {count_of(row['steps'], 'step')}"
            return f"No {NOUNS[row['kind']]} came back even of {size}, fewer than the app takes: {best}."
    return None


def _is_easier(row: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """Tell whether an update is of no more records and no more steps than another."""
    pairs = [(row[key], step[key]) for key in ("pictures", "steps")]
    return all(few <= many for few, many in pairs)


def _why_not_attacked(report: Mapping[str, Any]) -> str:
    attacks = next((line for line in report.get("not_tested", ()) if line.startswith("attacks on uploads: ")), "")
    return attacks.partition(": ")[2] or report["recipe"].get("why") or "as said below"


def _of_records(records: Mapping[str, Any]) -> str:
    """State how many records came back, the best figure, and what a blank guess gets."""
    kind = str(records["kind"])
    best = figure(records["best"], records["floor"], records["unit"])
    count = f"{records['came_back']} of {records['of']} {kind}" if records["came_back"] else f"No {NOUNS[kind]}"
    return f"{count} came back{': ' if best else ''}{best} ({records['attack']})."


def _of_control(report: Mapping[str, Any]) -> str:
    """State at which level the control came back: as a picture or a row, or as features alone."""
    level = report["control"]["levels"][0]
    record = "picture" if level["kind"] == "pictures" else "record"
    part = f", its {level['kind']} alone" if level["kind"] in IN_PART else ""
    best = figure(level["best"], level["floor"], level["unit"])
    return f"The control, one known {record} without a defence, came back{part}: {best} ({level['attack']})."


def judge_cheating(report: Mapping[str, Any]) -> ServerVerdict:
    """Judge what a server gets that changes the weights it sends, as far as such servers were played.

    Something leaks where the honest server is enough, or where a played server got a picture while it met everything
    that the app does to an update. It holds where servers that get a picture without the app's local_dp get none with
    it. Otherwise nobody can tell: none was played, or it was played without the app's mods or for fewer steps.

    Args:
        report: As ``report.json`` holds it.
    """
    server, played = "Cheating server", [row for row in report["cheating"] if row["played"]]
    leaking = [row for row in played if row["leaks"]]
    best = max(leaking or played, key=lambda row: row["psnr"], default=None)
    sentence = f"With {best['server']}, {best['said']}." if best else ""
    if judge_honest(report).outcome == "LEAKS":
        return ServerVerdict(
            server, "LEAKS", f"It gets what an honest one gets. {sentence if leaking else ''}".rstrip()
        )
    if best is None:
        reasons = [row["said"] for row in report["cheating"]]
        return ServerVerdict(server, "UNKNOWN", f"No server that changes weights was played: {_first(reasons)}.")
    if leaking:
        open_question = next((row["unlike"] for row in leaking if row.get("unlike")), None)
        certain = [row for row in leaking if not row.get("unlike")]
        if certain:
            row = max(certain, key=lambda candidate: candidate["psnr"])
            return ServerVerdict(server, "LEAKS", f"With {row['server']}, {row['said']}.")
        return ServerVerdict(server, "UNKNOWN", f"{sentence} But {open_question}.")
    stopped = [row for row in played if row.get("is_stopped")]
    if stopped and not any(row.get("unlike") for row in stopped):
        return ServerVerdict(server, "HOLDS", sentence)
    return ServerVerdict(
        server, "UNKNOWN", f"{sentence} That no played server gets a picture is no evidence of protection."
    )


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] if reasons else NOT_ATTACKED


def first_line(report: Mapping[str, Any]) -> str:
    """State in the first line of every report what stood in, or that nothing did.

    Args:
        report: As ``report.json`` holds it.
    """
    replaced = report["stand_ins"]
    if not replaced and report["problem"]:
        return "Nothing stood in, and the app did not run to its end."
    if not replaced:
        return "Nothing stood in: the app's own data and weights were used."
    replacements = "; ".join(
        f"{stand_in['instead']} in place of {stand_in['what']} {stand_in['name']}" for stand_in in replaced
    )
    return f"Stand-ins were used, so steps, batches and weights are not those of the deployment: {replacements}."


def verdict(report: Mapping[str, Any]) -> list[str]:
    """Sum up the audit in a few sentences: both servers first, then what else a reader should know.

    Args:
        report: As ``report.json`` holds it.
    """
    lines = [judge_honest(report).line, judge_cheating(report).line]
    lines += [
        f"{row['protection'].capitalize()}: {row['said']}" for row in report["protections"] if row["verified"] == "no"
    ]
    features = [row for row in attack_rows(report) if row.get("features_near")]
    if features:
        row = max(features, key=lambda entry: entry["features_near"])
        lines.append(f"Features come back ({row['attack']}): {result(row)}.")
    if tokens := [row for row in attack_rows(report) if row.get("tokens_right")]:
        row = max(tokens, key=lambda entry: entry["tokens_right"])
        lines.append(f"Tokens come back ({row['attack']}): {result(row)}.")
    return lines


def answers(report: Mapping[str, Any]) -> list[QuestionAnswer]:
    """Answer the three questions of somebody who is no engineer.

    Args:
        report: As ``report.json`` holds it.
    """
    words: Mapping[Outcome, Word] = {"HOLDS": "No", "LEAKS": "Yes", "UNKNOWN": "Not known"}
    honest = judge_honest(report)
    parts = ("Features come back", "Tokens come back")
    features = next((line for line in verdict(report) if line.startswith(parts)), "")
    word = "In part" if features and honest.outcome != "LEAKS" else words[honest.outcome]
    summary = find_records(report)
    is_stated = summary["kind"] in IN_PART and _of_records(summary) in honest.said
    said = " ".join(sentence for sentence in ("" if is_stated else features, honest.said) if sentence)
    records = QuestionAnswer("Do records come back?", word, said)
    given = [answer_labels(report), answer_membership(report), records]
    if not (count := report.get("sum_of_clients")):
        return given
    masked = f"An upload alone is masked; the server gets the sum over {count} clients, which this is of."
    return [entry._replace(said=f"{masked} {entry.said}") for entry in given]
