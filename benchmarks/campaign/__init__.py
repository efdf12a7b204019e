"""Campaigns: one question put to many cells, from its file to what is run."""
