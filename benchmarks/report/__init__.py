"""Tables, figures and the page made of a leaderboard."""
