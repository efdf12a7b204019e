"""The tests that run on CUDA where there is one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from fedmjp.benchmarks.performance.gpu_work import Work

ROOT = Path(__file__).parents[2]
PROCESSES = 6
LONGEST = 200  # seconds
TOLD = 400  # letters of a failure


def measure(work: Work) -> dict[str, Any]:
    """Passed, failed and skipped, and the first lines of each failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-n", str(PROCESSES), "--dist", "load", "-m", "cuda"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", "tests/test_cuda.py"]
        # One thread each, as tests have it everywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, timeout=min(LONGEST, work.left()), capture_output=True
            )
        except subprocess.TimeoutExpired as cut:
            lines = (cut.stdout or b"").decode(errors="replace").splitlines()
            failed = [line for line in lines if " FAILED " in line]
            passed = sum(" PASSED " in line for line in lines)
            return {"cut_after_seconds": cut.timeout, "passed": passed, "failed": len(failed), "failures": failed}
        if not report.exists():
            return {"error": (ended.stdout + ended.stderr).decode(errors="replace")[-2000:]}
        return _counted(ET.parse(report).getroot())  # noqa: S314 (pytest wrote it just now)


def _counted(root: ET.Element) -> dict[str, Any]:
    cases = list(root.iter("testcase"))
    wrong = {}
    for case in cases:
        found = [child for child in case if child.tag in ("failure", "error")]
        if found:
            wrong[case.get("name", "")] = f"{found[0].get('message', '')}"[:TOLD]
    skipped = sum(child.tag == "skipped" for case in cases for child in case)
    return {"passed": len(cases) - len(wrong) - skipped, "failed": len(wrong), "skipped": skipped, "failures": wrong}
