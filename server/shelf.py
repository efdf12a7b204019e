"""Where the updates of a round wait on the disk until all are there: memory holds one of them, however many clients."""

import copy
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message, MetricRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedmjp.errors import FederationError
from fedmjp.files import remove_files
from fedmjp.processes import return_free_memory
from fedmjp.wire import ARRAYS, BUFFERS, METRICS

UPDATE = r"\d+\.safetensors"  # how the files of updates are called
COLLECTED = 2**28  # bytes of updates after which what they took is given back


@dataclass(frozen=True)
class StoredUpdate:
    """A reply whose tensors lie in a file.

    Attributes:
        reply: Without its tensors; what it reports is left.
        path: Of the file, with tensors as RECORD/NAME.
    """

    reply: Message
    path: Path

    @property
    def metrics(self) -> MetricRecord:
        """Return the metrics that the client reports."""
        return self.reply.content.metric_records[METRICS]

    def tensors(self, record: str = ARRAYS, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Read tensors of a record by name; none where there is no such record.

        Args:
            record: Its name in the reply.
            names: Names of the tensors; None reads all.
        """
        prefix = f"{record}/"
        with safe_open(self.path, framework="pt") as file:
            keys = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (the file is no mapping)
            keys = keys if names is None else [prefix + name for name in names]
            return {key.removeprefix(prefix): file.get_tensor(key) for key in keys}


class Shelf:
    """A folder for the updates of one round at a time; what an earlier run left there is removed.

    Args:
        folder: Of its own; None takes a temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory()  # goes with this object
            folder = Path(self._temporary.name)
        folder.parent.mkdir(parents=True, exist_ok=True)  # now, and not where it was removed during a run
        self._folder, self._kept, self._uncollected = folder, 0, 0
        self.clear()

    def keep(self, reply: Message, records: Sequence[str] = (ARRAYS, BUFFERS)) -> StoredUpdate:
        """Put a screened reply aside.

        Args:
            reply: What a client sent.
            records: Those whose tensors are read again; others are dropped.

        Raises:
            FederationError: If the disk does not take it.
        """
        tensors = {
            f"{record}/{name}": tensor.contiguous()
            for record, arrays in reply.content.array_records.items()
            if record in records
            for name, tensor in arrays.to_torch_state_dict().items()
        }
        path = self._folder / f"{self._kept}.safetensors"  # as UPDATE says
        try:
            self._folder.mkdir(exist_ok=True)
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            raise FederationError(
                f"an update cannot wait in {self._folder}: {error}; a round needs as many bytes as all its clients send"
            ) from None
        self._kept += 1
        sent = reply.content.array_records.values()
        self._uncollected += sum(len(array.data) for arrays in sent for array in arrays.values())
        if self._uncollected > COLLECTED:
            gc.collect()  # Flower's engine leaves updates in cycles, which Python alone would look for too late
            return_free_memory()
            self._uncollected = 0
        light = copy.copy(reply)
        light.content = RecordDict({METRICS: reply.content.metric_records[METRICS]})
        return StoredUpdate(light, path)

    def clear(self) -> None:
        """Remove all updates: the round is over."""
        remove_files(self._folder, UPDATE)
        self._kept = 0
