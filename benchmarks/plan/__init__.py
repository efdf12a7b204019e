"""From experiments to cells and trials."""
