"""``mjp_span``: one upload, exact where its certificate holds."""
