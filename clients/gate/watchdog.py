"""The end of a SuperNode's process: it comes with that of its loop, so that a supervisor starts the node again.

Flower's loop runs in the main thread. An error there, such as a single answer of HTTP 500, ends the loop and not the
process, whose other threads go on; SIGTERM is then handled by nobody. Here the loop's error ends the process in one
line, a loop that computes nothing for most of a minute counts as stuck, and signals that ask for an end have a bound.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from fedmjp.texts import printable

STUCK_SECONDS = 50.0  # without any computation of the loop, which asks for messages every three
STOP_SECONDS = 15.0  # that an ordinary end may take
POLL_SECONDS = 1.0
FAILED = 1
RUNTIME_THREAD = "supernode-runtime-http-api"  # Flower's name; apps' processes speak to it
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})


def run_to_the_end(run_loop: Callable[[], None]) -> NoReturn:
    """Run a SuperNode in this thread, the main one, and end the process with it.

    Args:
        run_loop: Runs until the SuperNode ends.
    """
    signals, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(signals, True)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)  # told even while the main thread cannot run a handler
    threading.Thread(target=_end_after_signal, args=(signals,), daemon=True).start()
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    threading.Thread(target=_end_where_stuck, args=(clock,), daemon=True).start()
    try:
        run_loop()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 (whatever it was, the node is gone)
        lines = str(error).splitlines()
        _end(f"the SuperNode's loop failed ({type(error).__name__}{': ' if lines else ''}{''.join(lines[:1])})")
    else:  # Flower has logged what the loop raised, and returned
        _end("the SuperNode's loop ended by the error that its log names")
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else FAILED * (code is not None))


def _end_after_signal(signals: int) -> None:
    """End the process a while after the first signal that asks for it, if it is still there then."""
    while not set(os.read(signals, 64)) & ENDING:
        continue
    time.sleep(STOP_SECONDS)
    _end(f"the SuperNode did not stop within {STOP_SECONDS:g} s of a signal")


def _end_where_stuck(clock: int) -> None:
    """End the process when its main thread has computed nothing for too long, or apps have nobody to speak to."""
    computed, idle_seconds, has_runtime = -1, 0.0, False
    while True:
        now = time.clock_gettime_ns(clock)
        # Looks are counted, not time: a process that was stopped for a while has not looked either.
        computed, idle_seconds = now, idle_seconds + POLL_SECONDS if now == computed else 0.0
        if idle_seconds > STUCK_SECONDS:
            _end(f"the SuperNode's loop did nothing for {STUCK_SECONDS:g} s")
        runs = any(thread.name == RUNTIME_THREAD for thread in threading.enumerate())
        has_runtime = has_runtime or runs
        if has_runtime and not runs:
            time.sleep(STOP_SECONDS)  # as in an ordinary end, in which it is the first to go
            _end("the SuperNode's server for its apps ended")
        time.sleep(POLL_SECONDS)


def _end(reason: str) -> NoReturn:
    """End the process at once with one line."""
    os.write(sys.stderr.fileno(), f"Error: {printable(reason)[:400]}: it ends, to be started again\n".encode())
    os._exit(FAILED)
