"""What runs on a client."""
