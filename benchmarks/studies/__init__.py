"""Studies with a command of their own: one question each."""
