"""A Django project with beat, worker and Singletons, as its users write one; everything is set in ``settings``."""

from .celery import app as celery_app

__all__ = ("celery_app",)
