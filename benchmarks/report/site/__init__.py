"""Several studies as static files: a landing page, a page per study, attack and defence, and a search."""
