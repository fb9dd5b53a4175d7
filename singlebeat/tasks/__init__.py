"""CELERY'S TASK SIDE: who sends a task, who runs it, and who looks after its lock meanwhile."""
