"""The server's own records: every upload, and the weights that had been sent for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.records import Upload, load_tensors, record_name, save_tensors, weights_digest

WEIGHTS = "weights-*.safetensors"


@dataclass(frozen=True)
class UploadFolder:
    """A folder of uploads, ``round-00001-node-<id>.safetensors``, and ``weights-<digest>.safetensors``."""

    folder: Path
    tensors: frozenset[str] = frozenset()  # to keep of every upload; empty keeps all

    def keep_weights(self, state: Mapping[str, Tensor]) -> str:
        """Store weights unless they are there already; return their digest.

        Args:
            state: The weights by name.
        """
        digest = weights_digest(state)
        path = self._weights_path(digest)
        if not path.exists():
            save_tensors(path, state, {"record": "weights"})
        return digest

    def keep(self, upload: Upload) -> None:
        """Store an upload, reduced to the tensors of the folder.

        Args:
            upload: As it came.
        """
        tensors = {name: tensor for name, tensor in upload.tensors.items() if not self.tensors or name in self.tensors}
        replace(upload, tensors=tensors).save(self.folder / record_name(upload.server_round, upload.node))

    def uploads(self) -> list[Upload]:
        """Load every upload, in the order of rounds and nodes."""
        return [Upload.load(path) for path in sorted(self.folder.glob("round-*.safetensors"))]

    def weights(self, digest: str) -> dict[str, Tensor]:
        """Load the weights with a digest.

        Args:
            digest: As ``keep_weights`` returned it.

        Raises:
            RecordError: If they are not there, or have another digest.
        """
        state, _ = load_tensors(self._weights_path(digest))
        if weights_digest(state) != digest:
            raise RecordError(f"{self._weights_path(digest)} was changed: its content has another digest")
        return state

    def _weights_path(self, digest: str) -> Path:
        return self.folder / WEIGHTS.replace("*", digest)
