"""Measurements of time and memory; their results stand in results/performance with their origin."""
