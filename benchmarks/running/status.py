"""How far a campaign is, read from its folder and database while it runs or after."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

import pandas as pd

from fedmjp.benchmarks.folder.trials import RecordedTrials
from fedmjp.benchmarks.plan.trial_plan import Cell, TrialPlan

WINDOW = timedelta(minutes=2)  # over which the rate is taken


@dataclass(frozen=True)
class Status:
    """Of a campaign, or of one cell: trials that are finished, that failed and that were not tried yet."""

    ok: int
    failed: int
    missing: int


@dataclass(frozen=True)
class CampaignStatus(Status):
    """Of a whole campaign.

    Attributes:
        cells: In the order of the plan, each with its own status.
        last: When the last trial was recorded, UTC.
        rate: Trials per second over the last minutes before that; None below two trials.
    """

    cells: tuple[tuple[Cell, Status], ...]
    last: datetime | None
    rate: float | None

    @property
    def planned(self) -> int:
        """Count the trials."""
        return self.ok + self.failed + self.missing

    @property
    def remaining(self) -> timedelta | None:
        """Estimate the time until all are tried, at the present rate."""
        return timedelta(seconds=self.missing / self.rate) if self.rate else None


def status(plan: TrialPlan, store: RecordedTrials) -> CampaignStatus:
    """Count what the database has of a plan.

    Args:
        plan: Its cells and trials.
        store: Their rows.
    """
    rows = store.frame(plan.trials["key"].tolist())
    joined = plan.trials[["key", "cell"]].merge(rows[["key", "status", "recorded_at"]], on="key", how="left")
    counts = Counter(zip(joined["cell"], joined["status"].fillna("missing"), strict=True))
    cells = tuple(
        (cell, Status(*(counts[index, kind] for kind in ("ok", "failed", "missing"))))
        for index, cell in enumerate(plan.cells)
    )
    times = rows["recorded_at"].sort_values()
    return CampaignStatus(
        ok=sum(tally.ok for _, tally in cells),
        failed=sum(tally.failed for _, tally in cells),
        missing=sum(tally.missing for _, tally in cells),
        cells=cells,
        last=None if times.empty else times.iloc[-1].to_pydatetime(),
        rate=_rate(times),
    )


def _rate(times: "pd.Series[pd.Timestamp]") -> float | None:
    recent = times[times > times.iloc[-1] - WINDOW] if len(times) else times
    seconds = (recent.iloc[-1] - recent.iloc[0]).total_seconds() if len(recent) > 1 else 0.0
    return len(recent) / seconds if seconds else None
