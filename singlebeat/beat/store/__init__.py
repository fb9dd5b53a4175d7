"""The schedule in Redis: due entries, claims, quarantine and history."""
