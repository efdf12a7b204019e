"""Memory that was freed between pieces that stay goes back to the system."""

import psutil

from fedmjp.processes import return_free_memory

PIECE, PIECES = 60_000, 2_000  # bytes: small enough that the C library keeps what is freed


def test_freed_memory_between_pieces_that_stay_is_given_back() -> None:
    process = psutil.Process()
    pieces = [bytearray(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        piece[:] = b"1" * PIECE
    kept = pieces[::20]
    del pieces, piece
    before = process.memory_info().rss
    return_free_memory()
    assert before - process.memory_info().rss > PIECE * PIECES / 2
    assert len(kept) == PIECES / 20
