"""Run somebody's Flower app as it stands, and say what its uploads give away."""
