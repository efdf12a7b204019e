"""A federation of real sites: certificates and keys, a SuperLink behind a reverse proxy, and what must fail."""
