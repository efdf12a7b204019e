"""An audit as files: the page, the one-page summary and the JSON that both are made of."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from fedmjp import provenance
from fedmjp.benchmarks.audit import wording
from fedmjp.benchmarks.audit.advice import actions
from fedmjp.benchmarks.audit.audit import Findings
from fedmjp.benchmarks.audit.running import LOG
from fedmjp.benchmarks.audit.verdict import (
    POLICY,
    answers,
    exit_code,
    first_line,
    judge_cheating,
    judge_honest,
    verdict,
)
from fedmjp.benchmarks.folder.output import write_json, write_text

JSON, PAGE, SUMMARY = "report.json", "report.html", "summary.html"
SHOWN_SIDE = 160  # pixels of a picture on the page
TITLES = ("private", "recovered")
MOST_STRIPS = 8


def write_report(findings: Findings, folder: Path, *, command: str) -> None:
    """Write all files of an audit, with what made them.

    Args:
        findings: Of the audit.
        folder: That they go to.
        command: That made them.
    """
    report = {**findings.report, "command": command, "made_by": provenance.environment()}
    servers = {"honest": judge_honest(report), "cheating": judge_cheating(report)}
    report |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_line": first_line(report),
        "verdict": verdict(report),
        "servers": {name: {"verdict": judged.outcome, "said": judged.said} for name, judged in servers.items()},
        "answers": [answer._asdict() for answer in answers(report)],
        "policy": POLICY,
        "exit_code": exit_code(report),
    }
    write_json(folder / JSON, report)
    (folder / LOG).unlink(missing_ok=True)
    if findings.log:
        write_text(folder / LOG, "\n".join(findings.log) + "\n")
    strips = [(title, [_png(picture) for picture in pictures]) for title, pictures in findings.strips[:MOST_STRIPS]]
    values = {
        "report": report,
        "strips": strips,
        "titles": TITLES,
        "actions": actions(report, servers["honest"].outcome, servers["cheating"].outcome),
        "judged": list(servers.values()),
        "step": wording.step(report["step"]),
        "made": wording.made(report),
        "records": records(report["leaves"]),
        "attacks": by_reason(report["attacks"]),
        "controls": wording.controls(report["server_controls"]),
        "recipe": list(wording.recipe(report["recipe"])),
        "unusual": wording.unusual(report["unusual"]),
    }
    for name in (PAGE, SUMMARY):
        write_text(folder / name, _environment().get_template(f"{name}.jinja").render(**values))


def records(leaves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group what leaves by record: how many tensors and bytes, or every value by name.

    Args:
        leaves: Entries of the report.
    """
    rows = []
    for (message, record), group in groupby(leaves, key=lambda entry: (entry["message"], entry["record"])):
        entries = list(group)
        tensors = [entry for entry in entries if "shape" in entry]
        rows.append(
            {
                "message": message,
                "record": record,
                "what": entries[0]["what"],
                "tensors": len(tensors),
                "bytes": sum(entry["bytes"] for entry in entries),
                "entries": entries,
                "values": [entry for entry in entries if "shape" not in entry],
            }
        )
    return rows


def by_reason(attacks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group attacks that share a reason, without floors; those that apply first.

    Args:
        attacks: Rows of the report.
    """
    groups: dict[tuple[bool, str], dict[str, Any]] = {}
    for row in attacks:
        if row["role"] == "attack":
            key = (not row["applies"], row["reason"])
            group = groups.setdefault(key, {**row, "attacks": [], "reveals": []})
            group["attacks"].append(row["attack"])
            group["reveals"] += [row["reveals"]] if row["reveals"] not in group["reveals"] else []
    return [groups[key] for key in sorted(groups, key=lambda group_key: group_key[0])]


def _png(picture: Tensor) -> str:
    """Encode a picture (1 or 3, height, width) in [0, 1] as a data address."""
    pixels = (picture.expand(3, -1, -1).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(pixels)
    factor = max(1, SHOWN_SIDE // image.width)
    resized = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    resized.thumbnail((SHOWN_SIDE * 2, SHOWN_SIDE * 2))
    content = io.BytesIO()
    resized.save(content, "png")
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedmjp.benchmarks.audit", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("fedmjp.benchmarks.report").joinpath("page.css").read_text(encoding="utf-8")
    style += resources.files("fedmjp.benchmarks.audit").joinpath("report.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    environment.filters["result"] = wording.result
    environment.globals.update(style=Markup(style), digest=f"sha256-{digest}", page=PAGE, json=JSON)  # noqa: S704 (ours)
    environment.globals["scale"] = wording.SCALE
    return environment
