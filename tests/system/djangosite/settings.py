"""Settings of Django and, under Celery's namespace, of Celery, singlebeat, RedBeat and celery-singleton."""

import os

_URL = os.environ["SB_TEST_URL"]

#: Databases of the server: a setting that is not read would leave its data in the broker's.
SCHEDULE_DB, LOCK_DB = 1, 2

SECRET_KEY = "for tests"
INSTALLED_APPS = ["tests.system.djangosite"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SB_TEST_DJANGO_DB"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

CELERY_BROKER_URL = _URL
CELERY_RESULT_BACKEND = _URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TIMEZONE = "Europe/Berlin"
CELERY_BEAT_SCHEDULER = "singlebeat.Scheduler"
CELERY_BEAT_SCHEDULE = {
    "note": {"task": "tests.system.djangosite.tasks.add_note", "schedule": 1.0, "args": ["from beat"]}
}
CELERY_REDBEAT_REDIS_URL = f"{_URL}/{SCHEDULE_DB}"
CELERY_REDBEAT_KEY_PREFIX = "site:"
CELERY_SINGLETON_BACKEND_URL = f"{_URL}/{LOCK_DB}"
CELERY_SINGLETON_KEY_PREFIX = "site-lock:"
CELERY_SINGLEBEAT_LOCK_LEASE = 7.0

SINGLEBEAT_WEB = {"read_only": True}
