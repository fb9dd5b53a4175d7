"""Singletons of a Django project, with both orders of their bases."""

from typing import Any

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from celery.signals import task_postrun, worker_process_init
from django.db import connection

from singlebeat import Singleton

from .models import Note


class SingletonTask(Singleton, DjangoTask):
    abstract = True


class DjangoSingleton(DjangoTask, Singleton):
    abstract = True


@shared_task(base=SingletonTask)
def add_note(text: str) -> int:
    Note.objects.create(text=text)
    return Note.objects.filter(text=text).count()


@shared_task(base=DjangoSingleton)
def touch_note(text: str) -> int:
    return Note.objects.filter(text=text).count()


@shared_task
def plain_note(text: str) -> int:
    return Note.objects.filter(text=text).count()


@worker_process_init.connect
def listen(**_: Any) -> None:
    task_postrun.connect(tell_connection)  # here, in the child: behind Celery's own receivers


def tell_connection(task_id: str, **_: Any) -> None:
    print(f"after {task_id} the database is {'closed' if connection.connection is None else 'open'}")  # noqa: T201
