"""Vision transformers by name, with or without MJP's position embedding."""
