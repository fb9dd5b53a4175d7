"""README's first app and its snippets, as they stand: only the addresses of the servers are others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery.backends.base import DisabledBackend
from celery_singleton import Singleton as TheirSingleton

from singlebeat import Singleton
from tests.support import ROOT, RedisServer
from tests.system.apps import make_app

TEXT = Path(ROOT, "README.rst").read_text("utf-8")


def snippets(title: str) -> list[str]:
    """Return the Python blocks of README below a title, which may be one in bold."""
    below = TEXT[TEXT.index(title) :]
    blocks = re.findall(r"code-block:: python\n\n((?:    .*\n|\n)+)", below)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


@pytest.fixture
def shop(server: RedisServer, redis: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """README's ``shop.py``, with its tasks and those of the snippet about Singletons."""
    module = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)
    for code in (snippets("**Beat.**")[0], snippets("**Singleton.**")[0]):
        exec(re.sub(r"redis://localhost/\d", server.url, code), vars(module))
    return module


def test_the_first_app_has_every_task_that_the_readme_names(shop):
    named = set(
        re.findall(r"\bshop\.(\w+)\b(?!\.)", "\n".join(snippets("**Beat.**")[:3]) + TEXT[: TEXT.index("Install\n")])
    )

    assert named - {"py"} <= {name.removeprefix("shop.") for name in shop.app.tasks}


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
