"""The upload gate: what an upload gives away is tried at the site, and what the policy forbids does not leave."""
