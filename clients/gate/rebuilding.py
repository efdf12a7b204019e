"""A reply built anew from what the gate understood of it: the values, in the layout that came in, by canonical bytes.

Bytes behind an array, shapes, types, names, orders and digits beyond the policy's are the app's to choose: they do not
leave. What does leave in clear is counted in bits, which the ledger adds up.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedmjp.clients.gate.arrays import ArrayLayout, Numbers, cast_numbers, decode_numbers, encode_numbers, read_layout
from fedmjp.clients.gate.metrics import OF_FLOWER, list_names, rebuild_values
from fedmjp.clients.gate.policy import ListedArray, Policy
from fedmjp.clients.gate.reasons import Reason, RefusedError
from fedmjp.clients.gate.rounding import round_change

RUN_BITS = 97  # of equal changes of whole numbers one behind another: the change, and how many
LONGEST_NAME, LETTER_BITS = 32, 21  # of further records of arrays
ANSWERED_AS = {"fitres.parameters": "fitins.parameters"}  # by Flower's NumPyClient


@dataclass(frozen=True)
class IncomingArray:
    """An array that came in, or that the policy lists."""

    layout: ArrayLayout
    array: Array | None = None  # None where the policy lists it

    @property
    def numbers(self) -> Numbers | None:
        """Decode the numbers; None where there are none."""
        return None if self.array is None else decode_numbers(self.array, self.layout)


@dataclass
class Rebuilt:
    """The content that leaves, and what it costs."""

    content: RecordDict = field(default_factory=RecordDict)
    form: list[str] = field(default_factory=list)  # which of the allowed records, names and lengths are there
    form_bits: int = 0  # to say so, the first time
    value_bits: int = 0  # of numbers and text in clear

    def count_bits(self, last_form: str) -> int:
        """Count the bits of the reply: one says that it has the form of the last, or the form is counted as well.

        Args:
            last_form: Digest of the form of the last reply of this kind; empty where there is none.
        """
        return 1 + self.value_bits + (0 if last_form == self.form_digest else self.form_bits)

    @property
    def form_digest(self) -> str:
        """Return a digest of the form, to compare with that of the last reply."""
        return hashlib.sha256("\n".join(self.form).encode(errors="surrogatepass")).hexdigest()[:16]


class Rebuilder:
    """Builds replies to a message anew, in the layout of the message.

    Args:
        message: From the server, as it came in.
        policy: Of the site.
    """

    def __init__(self, message: Message, policy: Policy) -> None:
        self._policy = policy
        self._incoming = {name: _read_record(record) for name, record in message.content.array_records.items()}
        self._names = list_names(policy.clear)
        self._records = self._names | {str(name) for name in message.content}

    def rebuild(self, content: RecordDict, *, rounding: bool = False) -> Rebuilt:
        """Build the content of a reply anew.

        Args:
            content: Of the app's reply.
            rounding: Whether changes are rounded.

        Raises:
            RefusedError: If a record, name, shape, type or number is none that came in or that the policy lists.
        """
        rebuilt = Rebuilt()
        free = dict(self._incoming)
        for name, record in sorted(content.items(), key=lambda pair: self._place(*pair)):
            if isinstance(record, ArrayRecord):
                rebuilt.content[str(name)] = self._rebuild_arrays(str(name), record, free, rebuilt, rounding=rounding)
            elif isinstance(record, MetricRecord | ConfigRecord):
                self._rebuild_plain(str(name), record, rebuilt)
        return rebuilt

    def _place(self, name: object, record: object) -> tuple[int, bool, str]:
        """Order records by what they hold, those first that answer one that came in, and by name."""
        return _rank(record), str(name) not in self._incoming, str(name)

    def _rebuild_plain(self, name: str, record: MetricRecord | ConfigRecord, rebuilt: Rebuilt) -> None:
        """Build a record of metrics or settings anew."""
        if name not in self._records and name not in OF_FLOWER:
            raise RefusedError(Reason.NAMES)
        values, bits = rebuild_values(name, record, self._policy.clear, self._names)
        if isinstance(record, MetricRecord):
            rebuilt.content[name] = MetricRecord(values)
        else:
            rebuilt.content[name] = ConfigRecord(values)
        lengths = {key: len(value) if isinstance(value, list) else -1 for key, value in values.items()}
        rebuilt.form += [f"{type(record).__name__} {name}", *(f"{key} {lengths[key]}" for key in values)]
        choices = _bits(len(self._records) + len(OF_FLOWER)) + len(values) * _bits(len(self._names) + len(OF_FLOWER))
        rebuilt.form_bits += choices + sum(_bits(length + 1) + 1 for length in lengths.values())
        rebuilt.value_bits += bits

    def _rebuild_arrays(
        self,
        name: str,
        record: ArrayRecord,
        free: dict[str, dict[str, IncomingArray]],
        rebuilt: Rebuilt,
        *,
        rounding: bool,
    ) -> ArrayRecord:
        """Build a record of arrays anew; the record that came in, whose layout it has, is no longer free."""
        allowed = self._allow_arrays(name, record, free)
        if not allowed:
            allowed = self._find_twin(name, record, free)
            rebuilt.form_bits += LETTER_BITS * len(name)
        arrays: dict[str, Array] = {}
        changes = [np.zeros(0, np.int64)]
        for key, array, incoming in _pair(record, allowed):
            layout = read_layout(array)
            bytes_of_model = layout.is_bytes and incoming.layout.is_bytes and not rounding
            if layout.shape != incoming.layout.shape and not bytes_of_model:
                raise RefusedError(Reason.LAYOUT)
            numbers = cast_numbers(decode_numbers(array, layout), incoming.layout.dtype)
            if numbers.dtype.kind != "f":
                if not bytes_of_model:
                    changes.append(_change_counters(numbers, incoming.numbers))
            elif rounding:
                base = None if self._policy.kind in ("gradient", "change") else incoming.numbers
                numbers = round_change(numbers, base)
            arrays[key] = encode_numbers(numbers, declared=incoming.layout.declared)
        rebuilt.form += [f"arrays {name}", *arrays]
        rebuilt.form_bits += _bits(len(self._records) + len(OF_FLOWER)) + 1
        if len(arrays) < len(allowed):  # each may be there or not
            rebuilt.form_bits += len(allowed)
        rebuilt.value_bits += RUN_BITS * _count_runs(np.concatenate(changes))
        return ArrayRecord(arrays)

    def _allow_arrays(
        self, name: str, record: ArrayRecord, free: dict[str, dict[str, IncomingArray]]
    ) -> dict[str, IncomingArray]:
        """Return the arrays that a record may have: those that came in, or that the policy lists."""
        counterpart = self._policy.arrays.get(name)
        if isinstance(counterpart, str):
            return self._incoming.get(counterpart, {})
        listed = {
            key.removeprefix(f"{name}/"): IncomingArray(_as_layout(value))
            for key, value in self._policy.arrays.items()
            if key.startswith(f"{name}/") and isinstance(value, ListedArray)
        }
        if listed:
            return listed
        source = ANSWERED_AS.get(name, name)
        if source not in free and (name in self._records or name in OF_FLOWER):
            source = next((key for key in free if _fits(record, free[key])), source)
        return free.pop(source, {})

    def _find_twin(self, name: str, record: ArrayRecord, free: Mapping[str, object]) -> dict[str, IncomingArray]:
        """Find the layout of a further record, as of control variates: that of a whole record which was answered.

        Raises:
            RefusedError: If there is none, or the policy lets nothing out that cannot be judged.
        """
        answered = (arrays for key, arrays in self._incoming.items() if key not in free)
        twin = next((arrays for arrays in answered if record.keys() == arrays.keys()), None)
        if twin is None or len(name) > LONGEST_NAME or self._policy.unjudged == "refuse":
            raise RefusedError(Reason.LAYOUT)
        return twin


def _read_record(record: ArrayRecord) -> dict[str, IncomingArray]:
    """Read the arrays of a server's record; one that does not decode has no counterpart in a reply."""
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = IncomingArray(read_layout(array), array)
        except RefusedError:
            continue
    return arrays


def _as_layout(listed: ListedArray) -> ArrayLayout:
    return ArrayLayout(listed.shape, np.dtype(listed.dtype), fortran=False, offset=0, declared=True)


def _pair(record: ArrayRecord, allowed: dict[str, IncomingArray]) -> Iterator[tuple[str, Array, IncomingArray]]:
    """Pair the arrays of a reply with those that it may have, in the order of those.

    Raises:
        RefusedError: If it has further names.
    """
    if not _fits(record, allowed):
        raise RefusedError(Reason.LAYOUT)
    by_name = record.keys() <= allowed.keys()
    for place, (name, incoming) in enumerate(allowed.items()):
        key = name if by_name else str(place)
        if key in record:
            yield key, record[key], incoming


def _fits(record: ArrayRecord, incoming: Mapping[str, IncomingArray]) -> bool:
    return record.keys() <= incoming.keys() or _numbered(record, incoming)


def _numbered(record: ArrayRecord, incoming: Mapping[str, IncomingArray]) -> bool:
    """Tell whether a record has numbers for names, one for each array that came in."""
    return len(record) == len(incoming) and record.keys() == {str(place) for place in range(len(record))}


def _change_counters(numbers: Numbers, base: Numbers | None) -> Numbers:
    wide = numbers.astype(np.int64).reshape(-1)
    return wide if base is None else wide - base.astype(np.int64).reshape(-1)


def _count_runs(changes: Numbers) -> int:
    """Count the runs of equal changes that are none of zeros."""
    if not changes.size:
        return 0
    begins = np.concatenate([[True], changes[1:] != changes[:-1]])
    return int(np.count_nonzero(begins & (changes != 0)))


def _rank(record: object) -> int:
    return 0 if isinstance(record, ArrayRecord) else 1 if isinstance(record, MetricRecord) else 2


def _bits(choices: int) -> int:
    return math.ceil(math.log2(max(choices, 1) + 1))
