"""What the apps of README and docs promise beside what ``tests/docs`` runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import _state
from celery.backends.base import DisabledBackend
from celery_singleton import Singleton as TheirSingleton

from singlebeat import Singleton, embedded
from tests.docs.pages import python
from tests.support import ROOT, RedisServer, page
from tests.system.apps import make_app

README = (ROOT / "README.rst").read_text("utf-8")


@pytest.fixture
def make_shop(server: RedisServer, redis: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes the module ``shop`` of a document from blocks of it; no app of another test gets its tasks."""
    module = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setattr(embedded, "redis_url", lambda: server.celery_url)

    def make(*codes: str) -> ModuleType:
        for code in codes:
            exec(re.sub(r"redis://localhost/\d", server.url, code), vars(module))
        return module

    yield make
    module.app.close()
    vars(module).clear()  # a result unsubscribes when it is collected: not after the end of the server


@pytest.fixture
def shop(make_shop: Callable[..., ModuleType]) -> ModuleType:
    """README's ``shop.py``, with its task and that of the snippet about Singletons."""
    return make_shop(*python("README")[:2])


@pytest.mark.parametrize("name", ["how-to/entries", "tutorial"])
def test_the_app_of_a_page_has_every_task_that_the_page_names(make_shop, name):
    shop = make_shop(python(name)[0])

    named = set(re.findall(r"\bshop\.(?!py\b)(\w+)\b", page(name)))
    assert named
    assert named <= {name.removeprefix("shop.") for name in shop.app.tasks}


def test_the_first_app_has_every_task_that_the_readme_names(shop):
    named = set(re.findall(r"\bshop\.(?!py\b)(\w+)\b", README))

    assert named <= {name.removeprefix("shop.") for name in shop.app.tasks}


def test_the_result_of_the_first_call_can_be_awaited(shop):
    assert shop.first == shop.again
    assert not isinstance(shop.app.backend, DisabledBackend)
    assert shop.first.state == "PENDING"


@pytest.mark.parametrize("own", [Singleton, TheirSingleton])
def test_calls_that_differ_in_their_writing_only_are_equal_here(server, redis, own):
    def work(a: Any, b: int = 2) -> None: ...

    with make_app(server.celery_url) as app:
        task = app.task(work, name="work", base=own, shared=False)
        ways = [([1], {}), ([1, 2], {}), ([], {"a": 1}), ([1], {"b": 2})]
        keys = {task.generate_lock("work", *way) for way in ways}

    assert len(keys) == (1 if own is Singleton else 4)
