"""What `fedmjp audit` says of somebody's apps, one after another, each in a process of its own.

``python results/audits/study.py --clones FOLDER --apps FOLDER --reports FOLDER --output FOLDER``. The apps of
``apps.csv`` are taken out of clones of their repositories, ``OWNER+NAME`` in the first folder, at their commits, into
the second one; without clones, an app is any folder in the second one that Flower runs. A row per app: the answers to
the three questions, both verdicts, what it sends, what came back, protections, the exit code, how many files of the
app's folder are other than before, and seconds: on the clock, and of processors, which other programs change little.
Pages, which show pictures, stay in the folder of the reports.
"""

import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from fedmjp.benchmarks.audit.app import read_app
from fedmjp.benchmarks.audit.report import JSON
from fedmjp.benchmarks.audit.verdict import answers, judge_cheating, judge_honest
from fedmjp.benchmarks.scripts import keep_table, timed
from fedmjp.errors import AppError
from fedmjp.running import run_function

LIST = Path(__file__).with_name("apps.csv")
SHOWN = ("app", "exit_code", "seconds", "labels", "membership", "records", "honest", "problem")


def main(
    apps: Annotated[Path, typer.Option(help="Folder of the apps' folders.", metavar="FOLDER")],
    reports: Annotated[Path, typer.Option(help="Folder for the reports.", metavar="FOLDER")],
    clones: Annotated[
        Path | None, typer.Option(help="Folder of clones that the listed apps are taken out of.", metavar="FOLDER")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path("results/audits"),
    run_config: Annotated[
        list[str] | None,
        typer.Option(help="Of an app's run config; repeat it.", metavar="APP:KEY=VALUE"),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds that an app may run.", min=1)] = 600.0,
) -> None:
    """Audit every app, and keep a row for each."""
    rows = []
    for place in find_apps(apps) if clones is None else take_out(clones, apps):
        own = [text.partition(":")[2] for text in run_config or () if text.partition(":")[0] == place.name]
        rows.append(audited(place, reports / place.name, own, time_limit))
        table = pd.DataFrame(rows)
        keep_table(output, table, {"run_config": run_config or []})  # as far as it is: an audit takes minutes
        typer.echo(f"{place.name}: exit code {rows[-1]['exit_code']}, {rows[-1]['seconds']:.0f} s")
    typer.echo(table[list(SHOWN)].fillna("").to_markdown(index=False, disable_numparse=True))


def take_out(clones: Path, apps: Path) -> Iterator[Path]:
    """Take the listed apps out of clones at their commits."""
    for app in pd.read_csv(LIST, keep_default_na=False).itertuples():
        place = apps / str(app.name)
        place.mkdir(parents=True)
        clone, path = clones / str(app.repository).replace("/", "+"), str(app.path)
        depth = len(Path(path).parts)
        archive = ["git", "-C", str(clone), "archive", str(app.commit), *([path] if path else [])]
        content = subprocess.run(archive, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(place), f"--strip-components={depth}"], input=content, check=True)
        yield place


def find_apps(folder: Path) -> Iterator[Path]:
    """Folders of apps, in the order of their names."""
    for path in sorted(folder.rglob("pyproject.toml")):
        try:
            read_app(path.parent)
        except AppError:
            continue
        yield path.parent


def audited(app: Path, output: Path, run_config: Sequence[str], time_limit: float) -> dict[str, Any]:
    """Audit an app with stand-ins, and tell what its report says."""
    options = [part for text in run_config for part in ("--run-config", text)]
    command = [sys.executable, "-m", "fedmjp", "audit", str(app), "--stand-in", "--output", str(output), *options]
    before, busy = digests(app), _busy()
    done, seconds = timed(
        lambda: subprocess.run([*command, "--time-limit", str(time_limit)], capture_output=True, check=False)
    )
    after = digests(app)
    changed = sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
    path = output / JSON
    last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]  # where there is no report
    report: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return {
        "app": app.name,
        "app_sha256": hashlib.sha256(json.dumps(before).encode()).hexdigest(),
        "changed_files": changed,
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_busy() - busy, 1),
        "run_config": " ".join(run_config),
        **(told(report) if report is not None else {"problem": "".join(last)}),
    }


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _busy() -> float:
    """Seconds of processors that finished child processes took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report says, in plain columns."""
    recipe, network, control = report["recipe"], report.get("network") or {}, report["control"] or {}
    pictures = [row for row in report["recovered"] if row["reveals"] == "pictures" and row["role"] == "attack"]
    labels = [row["labels_right"] for row in report["recovered"] if row["role"] == "attack" and "labels_right" in row]
    asked = dict(zip(("labels", "membership", "records"), answers(report), strict=True))
    sent = [entry for entry in report["leaves"] if "shape" in entry and entry["message"].startswith("train")]
    return {
        "problem": report["problem"],
        "verdict": " ".join(report["verdict"]),
        "honest": judge_honest(report).outcome,
        "cheating": judge_cheating(report).outcome,
        **{question: entry.answer for question, entry in asked.items()},
        **{f"{question}_said": entry.said for question, entry in asked.items()},
        "clients": report["clients"],
        "rounds": report["rounds"],
        "stand_ins": "; ".join(f"{one['what']} {one['name']}: {one['instead']}" for one in report["stand_ins"]),
        "sends": ", ".join(dict.fromkeys(entry["what"] for entry in sent)) or None,
        "bytes": sum(entry["bytes"] for entry in sent),
        "in_clear": ", ".join(sorted({entry["name"] for entry in report["leaves"] if "example" in entry})),
        "network": network.get("class", recipe.get("model")),
        "read_as": network.get("read_as"),
        "optimiser": recipe.get("optimiser"),
        "steps": recipe.get("steps"),
        "examples": recipe.get("examples"),
        "attacks_run": ", ".join(sorted({row["attack"] for row in report["recovered"] if row["role"] == "attack"})),
        "psnr": max((row["psnr_worst_case"] for row in pictures), default=None),
        "floor": max((row["floor_median"] for row in pictures), default=None),
        "above_floor": sum(row["above_floor"] for row in pictures) if pictures else None,
        "labels_right": max(labels, default=None),
        "control": ", ".join(control.get("leaks", [])) or control.get("reason"),
        "servers": "; ".join(f"{row['server']}: {row['said']}" for row in report["cheating"] if row["played"]),
        "protections": "; ".join(
            f"{row['protection']} ({row['verified'] or 'there is none'}): {row['said']}"
            for row in report["protections"]
        ),
        "not_tested": len(report["not_tested"]),
    }


if __name__ == "__main__":
    run_function(main)
