"""A study as it is published: one file of trials, of which tables, page and plots can be made again.

``trials.parquet`` has a row per trial, with a column per metric and one for ``COLOUR``; its metadata hold the plan and
the environments, compressed.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from fedmjp.benchmarks.folder.output import OutputFolder, write_json
from fedmjp.benchmarks.folder.scores import holds_scores, read_scores
from fedmjp.benchmarks.folder.trials import TRIAL_COLUMNS, RecordedTrials, StudyTrials, frame_of
from fedmjp.benchmarks.plan.trial_plan import COLUMNS, TrialPlan, cells_as_json, cells_from_json
from fedmjp.errors import OutputError
from fedmjp.files import read_file, replacing, require_regular
from fedmjp.metrics import COLOUR

TRIALS, MANIFEST = "trials.parquet", "manifest.json"
PLAN, ENVIRONMENTS = b"fedmjp.plan", b"fedmjp.environments"
SHA256 = "trials_sha256"
LARGEST = 2**30  # bytes of a manifest, or of a plan
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error)
LEVEL = 19  # of zstd: a study is written once, and kept
DIGITS = 16  # of 64 of a key: nothing compresses them, and all that a study's keys do is to keep its trials apart
# Of the store, what the plan does not say.
ROWS = (
    "status", "error", "model", "defence", "mask_ratio", "attack", "setting", "protocol", "realised_ratio",
    "weights_sha256", "attack_seconds", "environment_sha256", "recorded_at",
)  # fmt: skip


def write_study(path: Path, plan: TrialPlan, store: RecordedTrials) -> None:
    """Write a plan and the trials that were run of it into a parquet file.

    Args:
        path: Of the file.
        plan: Its cells and trials.
        store: Their rows.
    """
    frame = store.frame(plan.trials["key"].tolist())
    planned = plan.trials[list(COLUMNS)]
    rows = planned.merge(frame[["key", *ROWS, "scores", "diagnostics"]], on="key", how="inner", validate="one_to_one")
    for name in (*plan.about["metrics"], COLOUR):
        rows[name] = [scores.get(name) for scores in rows["scores"]]
    rows["key"] = _shortened(rows["key"])
    rows["diagnostics"] = [json.dumps(diagnostics) for diagnostics in rows["diagnostics"]]
    about = {**plan.about, "keep": "none"}  # pictures do not travel
    metadata = {
        PLAN: _packed({**about, "cells": cells_as_json(plan.cells)}),
        ENVIRONMENTS: _packed(store.environments()),
    }
    write_rows(path, rows.drop(columns="scores"), metadata)


def require_study(folder: Path, name: str) -> None:
    """Require that a folder holds no other results than an earlier publication of a campaign.

    Args:
        folder: That a study is to be written to; may be missing.
        name: Of the campaign.

    Raises:
        OutputError: If it holds another study, or results of another kind.
    """
    if not holds_study(folder):
        if (folder / MANIFEST).exists():
            raise OutputError(f"{folder} holds other results than a published study; name another folder")
        return
    if not holds_plan(folder):
        raise OutputError(f"{folder} holds the rows of a study that is no campaign; name another folder")
    if (former := read_plan(folder).about["name"]) != name:
        raise OutputError(f"{folder} holds the study {former!r}, this one is {name!r}; name another folder")


def write_rows(path: Path, rows: pd.DataFrame, metadata: Mapping[bytes, bytes] | None = None) -> str:
    """Write a table, whole or not at all, and return the SHA-256 of the file.

    Args:
        path: Of the file.
        rows: The table.
        metadata: Of the file.
    """
    table = pa.Table.from_pandas(rows, preserve_index=False)
    schema = table.schema
    split = [field.name for field in schema if pa.types.is_floating(field.type) or pa.types.is_timestamp(field.type)]
    with (
        replacing(path) as partial,
        parquet.ParquetWriter(
            partial,
            schema,
            compression="zstd",
            compression_level=LEVEL,
            use_dictionary=False,  # zstd has its own, over whole pages
            column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
            store_schema=False,  # a second copy of the metadata
        ) as file,
    ):
        file.write_table(table)
        file.add_key_value_metadata({**(schema.metadata or {}), **(metadata or {})})
    return _sha256(path)


def keep_rows(folder: Path, rows: pd.DataFrame, about: Mapping[str, Any]) -> None:
    """Keep the rows of a study that is no campaign, and its manifest.

    Args:
        folder: Made if it is not there.
        rows: The table.
        about: The manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MANIFEST, {**about, SHA256: write_rows(folder / TRIALS, rows)})


def read_study(folder: Path) -> tuple[TrialPlan, StudyTrials]:
    """Read the plan and the trials of a published study.

    Args:
        folder: With ``trials.parquet``.

    Raises:
        OutputError: If the folder holds none, or a damaged one.
    """
    path = folder / TRIALS
    with _damage_told(path):
        table = parquet.read_table(path)
        plan = _plan(path, table)
        return plan, _trials(table, plan.about["metrics"], _unpacked(table.schema.metadata[ENVIRONMENTS]))


def read_plan(folder: Path) -> TrialPlan:
    """Read the plan of a published study, in a fraction of the time; OutputError as of ``read_study``.

    Args:
        folder: With ``trials.parquet``.
    """
    path = folder / TRIALS
    with _damage_told(path):
        return _plan(path, parquet.read_table(path, columns=list(COLUMNS)))


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        require_regular(path)
        yield
    except FileNotFoundError:
        raise OutputError(f"{path.parent} holds neither trials.sqlite nor {TRIALS}") from None
    except (*DAMAGE, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OutputError(
            f"{path} is damaged, or no study of this version of fedmjp ({reason}); put a whole copy in its place"
        ) from None


def _plan(path: Path, table: pa.Table) -> TrialPlan:
    metadata = table.schema.metadata or {}
    if PLAN not in metadata:
        raise OutputError(
            f"{path.parent} holds a study that is no campaign: rows, and no plan of cells and trials; its README.md "
            "says what they show, and `fedmjp campaign verify` checks them"
        )
    about = _unpacked(metadata[PLAN])
    cells = cells_from_json(about.pop("cells"))
    return TrialPlan(cells, table.select(COLUMNS).to_pandas(), {**about, SHA256: _sha256(path)})


def open_results(output: OutputFolder, database: str = "") -> tuple[TrialPlan, RecordedTrials]:
    """Open the plan and the trials of a folder, as a run left them or as they were published.

    Args:
        output: The folder.
        database: URL of the trials, if they are elsewhere.

    Raises:
        OutputError: If it holds none.
    """
    if database or output.database.exists():
        return TrialPlan.load(output.root), output.store(database)
    if holds_study(output.root):
        return read_study(output.root)
    if holds_scores(output.root):
        return read_scores(output.root)
    raise OutputError(
        f"{output.root} holds neither trials.sqlite nor {TRIALS}; if its trials are elsewhere, name --database"
    )


def problems_of_rows(folder: Path) -> list[str]:
    """Say why the rows of a study that is no campaign cannot be those of its manifest.

    Args:
        folder: Of the study.
    """
    try:
        stated = json.loads(read_file(folder / MANIFEST, LARGEST)).get(SHA256)
        actual = _sha256(folder / TRIALS)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return [f"manifest.json or {TRIALS} is missing or damaged: {error}"]
    return [] if stated == actual else [f"{TRIALS} has SHA-256 {actual}, the manifest says {stated}"]


def holds_study(folder: Path) -> bool:
    """Tell whether the folder is a published study rather than what a run left.

    Args:
        folder: Any.
    """
    return (folder / TRIALS).exists()


def holds_plan(folder: Path) -> bool:
    """Tell whether the study's trials are a campaign's, with their plan.

    Args:
        folder: Of the study.
    """
    path = folder / TRIALS
    try:
        require_regular(path)
        return PLAN in (parquet.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException) as error:
        raise OutputError(
            f"{path} is damaged ({' '.join(str(error).split())}); put a whole copy in its place"
        ) from None


def _shortened(keys: "pd.Series[str]") -> "pd.Series[str]":
    """Cut keys to ``DIGITS``, unless that would join two trials."""
    short = keys.str[:DIGITS]
    return short if short.is_unique else keys


def _packed(values: Mapping[str, Any]) -> bytes:
    return base64.b64encode(zlib.compress(json.dumps(values).encode(), level=9))


def _unpacked(packed: bytes) -> Any:
    stream = zlib.decompressobj()
    text = stream.decompress(base64.b64decode(packed, validate=True), LARGEST)
    if not stream.eof:
        raise ValueError(f"the plan is cut, or of more than {LARGEST:,} bytes")
    return json.loads(text)


def _trials(table: pa.Table, metrics: Sequence[str], environments: Mapping[str, dict[str, Any]]) -> StudyTrials:
    columns = {name: table[name].to_pylist() for name in table.column_names}
    if len(set(columns["key"])) < len(table):
        raise ValueError("a key stands twice")
    used = {digest: environments[digest] for digest in set(columns["environment_sha256"])}
    columns["scores"] = _scores(columns, metrics)
    columns["diagnostics"] = list(map(json.loads, columns["diagnostics"]))
    columns["recorded_at"] = [time.replace(tzinfo=None) for time in columns["recorded_at"]]
    rows = zip(*(columns[name] for name in TRIAL_COLUMNS), strict=True)
    return StudyTrials(frame_of(sorted(rows)), used)


def _scores(columns: Mapping[str, Sequence[Any]], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Collect the scores of each trial by metric, and ``COLOUR`` where it was recorded."""
    scored = [*metrics, *({COLOUR} & columns.keys())]
    values = zip(*(map(_plain, columns[name]) for name in scored), strict=True)
    by_name = (dict(zip(scored, row, strict=True)) for row in values)
    return [
        {name: value for name, value in row.items() if name != COLOUR or value is not None} if status == "ok" else {}
        for status, row in zip(columns["status"], by_name, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Write missing values as a database has them."""
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
