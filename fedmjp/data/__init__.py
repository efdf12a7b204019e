"""Sources of private pictures, and how they are dealt to clients."""
