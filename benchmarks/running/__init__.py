"""Working a plan off: jobs, workers, scores, rows."""
