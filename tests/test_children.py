"""Processes of a pool end with the one that started them."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import alive, wait_until

PROGRAM = """
import os, sys, time
from pathlib import Path
from fedmjp.processes import workers

def work(folder, number):
    Path(folder, str(number)).write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    with workers(2) as pool:
        for number in range(2):
            pool.submit(work, sys.argv[1], number)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_workers_that_are_at_work_end_with_a_killed_parent(tmp_path: Path, sent: signal.Signals) -> None:
    program, started = tmp_path / "program.py", [tmp_path / "0", tmp_path / "1"]
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program, tmp_path]) as parent:
        wait_until(lambda: all(path.exists() and path.read_text() for path in started), seconds=60)
        working = [psutil.Process(int(path.read_text())) for path in started]
        parent.send_signal(sent)
        assert parent.wait(timeout=60) == -sent
    wait_until(lambda: not any(map(alive, working)), seconds=60)
