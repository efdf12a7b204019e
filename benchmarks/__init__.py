"""Campaigns: run what is missing, score it, store it, report it."""
