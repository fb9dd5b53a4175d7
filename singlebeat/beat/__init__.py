"""WHEN: the scheduler for celery beat."""
