"""The project's Celery app, as Celery's documentation has it."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.system.djangosite.settings")

app = Celery("djangosite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
