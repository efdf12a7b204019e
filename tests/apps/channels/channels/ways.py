"""Ways to send a secret in the reply of an app; each changes an honest reply."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.lib import format as npy

SECRET = Random(0).randbytes(24_576)
WAYS: dict[str, Callable[[Message], Message]] = {}
FIRST = "1.weight"


def way(function: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    WAYS[function.__name__] = lambda reply: function(reply) or reply
    return function


def values(reply: Message, name: str = FIRST) -> np.ndarray:
    return reply.content["arrays"][name].numpy().copy()


def put(reply: Message, array: Array | np.ndarray, name: str = FIRST) -> None:
    reply.content["arrays"][name] = array if isinstance(array, Array) else Array(array)


def raw(reply: Message, data: bytes, **changes: Any) -> None:
    array = reply.content["arrays"][FIRST]
    fields = {"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype} | changes
    put(reply, Array(**fields, data=data))


def with_header(reply: Message, header: str, version: tuple[int, int] = (1, 0)) -> None:
    """Write the first array by a header that NumPy would not write."""
    text = header.encode("latin1") + b"\n"
    begin = npy.magic(*version) + struct.pack("<H" if version == (1, 0) else "<I", len(text))
    raw(reply, begin + text + values(reply).tobytes())


def plain_header(reply: Message) -> str:
    array = values(reply)
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {array.shape}, }}"


@way
def honest(reply: Message) -> None:
    """Changes nothing."""


@way
def bytes_behind(reply: Message) -> None:
    raw(reply, reply.content["arrays"][FIRST].data + SECRET)


@way
def another_shape(reply: Message) -> None:
    put(reply, values(reply).reshape(-1, 2, 3, 1, 1))


@way
def a_larger_array(reply: Message) -> None:
    put(reply, np.frombuffer(SECRET, np.float32).copy())


@way
def a_large_shape_with_few_values(reply: Message) -> None:
    shape = tuple(struct.unpack("<4I", SECRET[:16]))
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    raw(reply, npy.magic(1, 0) + struct.pack("<H", len(text)) + text, shape=shape)


@way
def a_declared_shape_that_lies(reply: Message) -> None:
    raw(reply, reply.content["arrays"][FIRST].data, shape=tuple(struct.unpack("<300I", SECRET[:1200])))


@way
def a_declared_type_that_lies(reply: Message) -> None:
    raw(reply, reply.content["arrays"][FIRST].data, dtype=SECRET.hex())


@way
def a_serialisation_that_lies(reply: Message) -> None:
    raw(reply, reply.content["arrays"][FIRST].data, stype=SECRET.hex())


@way
def another_type(reply: Message) -> None:
    size = values(reply).size * 8
    put(reply, np.frombuffer(SECRET[:size], np.int64).reshape(values(reply).shape))


@way
def text_for_numbers(reply: Message) -> None:
    put(reply, np.full(values(reply).shape, SECRET[:40].hex()))


@way
def records_for_numbers(reply: Message) -> None:
    put(reply, np.zeros(values(reply).shape, dtype=[(SECRET[:40].hex(), "<f4")]))


@way
def truth_values(reply: Message) -> None:
    put(reply, np.frombuffer(SECRET[: values(reply).size], np.uint8).reshape(values(reply).shape) > 127)


@way
def float64_for_float32(reply: Message) -> None:
    wide = values(reply).astype(np.float64)
    bits = wide.reshape(-1).view(np.uint64)
    bits |= np.frombuffer(SECRET[: 4 * bits.size], np.uint32).astype(np.uint64) >> np.uint64(4)
    put(reply, wide)


@way
def low_bits_of_the_mantissa(reply: Message) -> None:
    """Puts secret bits below all that rounding keeps: half a step of it from the honest value, at most."""
    changed = values(reply)
    bits = changed.reshape(-1).view(np.uint32)
    bits ^= np.frombuffer(SECRET[: bits.size], np.uint8).astype(np.uint32) & np.uint32(7)
    put(reply, changed)


@way
def byte_order(reply: Message) -> None:
    put(reply, values(reply).astype(">f4"))


@way
def fortran_order(reply: Message) -> None:
    put(reply, np.asfortranarray(values(reply)))


@way
def padding_of_a_header(reply: Message) -> None:
    with_header(reply, plain_header(reply) + " " * SECRET[0] + "\t" * SECRET[1])


@way
def version_of_a_header(reply: Message) -> None:
    with_header(reply, plain_header(reply), (2, 0))


@way
def a_comment_in_a_header(reply: Message) -> None:
    with_header(reply, plain_header(reply) + f"# {SECRET[:2000].hex()}")


@way
def keys_twice_in_a_header(reply: Message) -> None:
    with_header(reply, f"{{'descr': '{SECRET[:99].hex()}', 'descr': '<f4', " + plain_header(reply)[17:])


@way
def a_compressed_array(reply: Message) -> None:
    raw(reply, zlib.compress(reply.content["arrays"][FIRST].data + SECRET))


@way
def an_archive_of_arrays(reply: Message) -> None:
    buffer = BytesIO()
    np.savez_compressed(buffer, values(reply), np.frombuffer(SECRET, np.uint8))
    raw(reply, buffer.getvalue())


@way
def an_empty_array_more(reply: Message) -> None:
    put(reply, np.zeros((0, *struct.unpack("<2H", SECRET[:4])), np.float32), "2.weight")


@way
def a_scalar_more(reply: Message) -> None:
    put(reply, np.array(0.123456789), "scale")


@way
def names_of_arrays(reply: Message) -> None:
    put(reply, np.zeros(1, np.float32), SECRET.hex())


@way
def look_alike_names(reply: Message) -> None:
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord({name.replace("e", "\u0435"): array for name, array in arrays.items()})


@way
def case_of_names(reply: Message) -> None:
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord({name.upper(): array for name, array in arrays.items()})


@way
def order_of_arrays(reply: Message) -> None:
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord(dict(sorted(arrays.items(), reverse=True)))


@way
def chunks_of_an_array(reply: Message) -> None:
    from flwr.app.message.arraychunk import ArrayChunk

    array = reply.content["arrays"][FIRST]
    cuts = [0, *sorted({500 + place for place in SECRET[:9]}), len(array.data)]
    parts = [ArrayChunk(memoryview(array.data)[low:high]) for low, high in pairwise(cuts)]
    array.__dict__["_chunks"] = [(part.object_id, part) for part in parts]


@way
def payloads_of_nan(reply: Message) -> None:
    changed = values(reply)
    payload = np.frombuffer(SECRET[: 4 * changed.shape[1]], np.uint32) & np.uint32(0x3FFFFF)
    changed[0] = (payload | np.uint32(0x7FC00000)).view(np.float32)
    put(reply, changed)


@way
def negative_zeros(reply: Message) -> None:
    """Marks zeros of an honest upload by their sign; that of the test has them in a bias."""
    changed = values(reply, "3.bias")
    changed[:5] = np.array([0.0, -0.0, -0.0, 0.0, -0.0])
    put(reply, changed, "3.bias")


@way
def plain_zeros(reply: Message) -> None:
    changed = values(reply, "3.bias")
    changed[:5] = 0.0
    put(reply, changed, "3.bias")


@way
def subnormal_numbers(reply: Message) -> None:
    changed = values(reply, "3.bias")
    changed[:5] = (np.frombuffer(SECRET[:20], np.uint32) & np.uint32(0x7FFFFF)).view(np.float32)
    put(reply, changed, "3.bias")


@way
def some_arrays_alone(reply: Message) -> None:
    del reply.content["arrays"]["3.bias"]


@way
def names_of_records(reply: Message) -> None:
    reply.content[SECRET.hex()] = MetricRecord({})


@way
def case_of_records(reply: Message) -> None:
    reply.content["Arrays"] = reply.content["arrays"]
    del reply.content["arrays"]


@way
def arrays_in_a_second_record(reply: Message) -> None:
    reply.content["config"] = ArrayRecord({FIRST: Array(np.frombuffer(SECRET, np.float32).copy())})


@way
def order_of_records(reply: Message) -> Message:
    content = RecordDict({"metrics": reply.content["metrics"], "arrays": reply.content["arrays"]})
    reply.__dict__["_content"] = content
    return reply


@way
def bytes_in_a_setting(reply: Message) -> None:
    reply.content["config"] = ConfigRecord({"loss": SECRET})


@way
def text_in_a_setting(reply: Message) -> None:
    reply.content["config"] = ConfigRecord({"accuracy": SECRET.hex()})


@way
def settings_of_many_truths(reply: Message) -> None:
    reply.content["config"] = ConfigRecord({"accuracy": [bool(byte & 1) for byte in SECRET]})


@way
def names_of_metrics(reply: Message) -> None:
    reply.content["metrics"][SECRET[:400].hex()] = 1.0


@way
def a_list_of_metrics(reply: Message) -> None:
    reply.content["metrics"]["loss"] = list(struct.unpack("<60d", SECRET[:480]))


@way
def low_digits_of_a_metric(reply: Message) -> None:
    reply.content["metrics"]["loss"] = 2.302 + int.from_bytes(SECRET[:4], "little") * 1e-14


@way
def payload_of_a_metric(reply: Message) -> None:
    (nan,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | int.from_bytes(SECRET[:6], "little")))
    reply.content["metrics"]["loss"] = nan


@way
def sign_of_a_metric(reply: Message) -> None:
    reply.content["metrics"]["loss"] = -0.0


@way
def order_of_metrics(reply: Message) -> None:
    reply.content["metrics"] = MetricRecord({"num-examples": 8, "loss": 2.302})


@way
def a_large_count(reply: Message) -> None:
    reply.content["metrics"]["num-examples"] = int.from_bytes(SECRET[:7], "little")


@way
def metadata(reply: Message) -> None:
    fields = reply.metadata.__dict__
    fields.update(
        {"_ttl": 1234.5678, "_created_at": 1.0, "_group_id": SECRET[:99].hex(), "_message_type": "train.secret"}
    )
    fields.update({"_message_id": SECRET[:32].hex(), "_src_task_id": 77})


@way
def text_of_an_error(reply: Message) -> Message:
    error = Error(code=int.from_bytes(SECRET[:3], "little"), reason=SECRET.hex())
    return Message(error=error, metadata=reply.metadata)


@way
def many_at_once(reply: Message) -> Message:
    """Takes several ways of which what leaves is the honest reply."""
    a_comment_in_a_header(reply)
    put(reply, values(reply, "1.bias").astype(">f4"), "1.bias")
    put(reply, np.asfortranarray(values(reply, "3.weight").astype(np.float64)), "3.weight")
    order_of_arrays(reply)
    low_digits_of_a_metric(reply)
    return order_of_records(reply)
