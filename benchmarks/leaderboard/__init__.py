"""From trials to the leaderboard: typed entries, statistics, verdicts, standings."""
