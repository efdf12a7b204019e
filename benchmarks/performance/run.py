"""Run a benchmark: ``python benchmarks/performance/run.py NAME [options] --json FILE``; ``--help`` lists them."""

from fedmjp.benchmarks.performance import (  # noqa: F401 (each registers its benchmarks)
    campaigns,
    closed_form,
    degraded_uploads,
    federations,
    gpu,
    gradient_matching,
    jacobian,
    loader,
    mjp_step,
    plan,
    upload_gate,
)
from fedmjp.benchmarks.performance.harness import app
from fedmjp.running import run

if __name__ == "__main__":
    run(app)
