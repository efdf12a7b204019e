"""The history of a training run: a CSV line and TensorBoard scalars per epoch or round."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedmjp.extras import require

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from fedmjp.files import replacing

Value = float | int | None


class History:
    """A run's rows in a CSV file that survives kills and in TensorBoard; the first column counts epochs or rounds."""

    def __init__(self, path: Path, tensorboard: Path) -> None:
        self._path, self._tensorboard = path, tensorboard
        self._writer: SummaryWriter | None = None
        require("training", "The history of a training")

    def rows(self) -> pd.DataFrame:
        """Return the recorded rows, without a line that a kill cut off."""
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return pd.read_csv(io.StringIO(whole)) if whole else pd.DataFrame()

    def append(self, row: Mapping[str, Value]) -> None:
        """Append a row.

        Args:
            row: Its values by column; the columns of all rows are the same.
        """
        counter, step = next(iter(row.items()))
        pd.DataFrame([row]).to_csv(self._path, mode="a", header=not self._path.exists(), index=False)
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (of an extra)

        # After a resumption TensorBoard drops what is made again.
        self._writer = self._writer or SummaryWriter(str(self._tensorboard), purge_step=int(step or 0))
        for name, value in row.items():
            if name != counter and value is not None:
                self._writer.add_scalar(name, value, int(step or 0))
        self._writer.flush()

    def keep_until(self, last: int) -> None:
        """Drop the rows after a checkpoint, which will be recorded again.

        Args:
            last: Epoch or round of the last row to keep.
        """
        rows = self.rows()
        remaining = rows[rows.iloc[:, 0] <= last] if len(rows) else rows
        if not len(remaining):
            self._path.unlink(missing_ok=True)
            return
        with replacing(self._path) as partial:
            remaining.to_csv(partial, index=False)
