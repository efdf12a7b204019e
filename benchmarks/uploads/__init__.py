"""Where the uploads of an experiment come from."""
