"""WHAT: entries, their definition and policy, as JSON and in Redis."""
