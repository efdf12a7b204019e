"""Last-block separation: what one upload of a batch states exactly about each of its pictures."""
