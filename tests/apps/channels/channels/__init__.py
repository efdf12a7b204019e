"""An app that sends a secret beside an honest upload, by one way after another."""
