"""README and docs cannot lie: what they let their readers type is run, and what they show is what is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import _state
from redis import Redis

from tests.docs.pages import PAGES, Step, blocks, steps
from tests.docs.reader import Reader, new_shop
from tests.docs.stories import STORIES, shop
from tests.support import CeleryLauncher, RedisServer, measured

#: The beginnings of commands and blocks that are not run here, with the reason.
NOT_RUN = {
    "python3 -m venv": "the tests run in such an environment",
    "pip install": "the tests have installed the package and its extras",
    "python -m pytest": "is what runs this very test",
    "mkdir first": "the tests have a folder of their own",
    "cd first": "the tests have a folder of their own",
    ". .venv/bin/activate": "the tests run in the environment",
    "python manage.py dumpdata": "what it writes is among the files of the tests",
    "celery -A shop singlebeat web": "tests/web serves the page, and uses the lines that these commands print",
    "celery -A exampleconf singlebeat web": "tests/system/test_example.py opens the page by the line of the demo",
    "export PAGE": "the story of the page sets both",
    "systemd-analyze verify": "tests/deploy/test_systemd.py verifies the units with the program that is there",
    "systemctl enable": "tests/deploy/test_systemd.py starts beat by the command of its unit",
}

EACH_PAGE = pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])


def is_run(step: Step) -> bool:
    """Return whether a reader of the tests does what the step says."""
    text = step.text.removeprefix(".venv/bin/")
    return not any(text.startswith(beginning) for beginning in NOT_RUN)


@pytest.fixture
def reader(
    server: RedisServer, redis: Redis, celery: CeleryLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    """A reader at the beginning of a page; no app of another test gets the tasks of the page."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setenv("SINGLEBEAT_REDIS_URL", server.url)
    monkeypatch.setattr("singlebeat.diagnosis.workers.TIMEOUT", 0.3)
    for name in ("shop", "exampleconf"):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    reader = Reader(server, redis, celery, tmp_path, new_shop())
    yield reader
    reader.close()


@EACH_PAGE
def test_the_blocks_of_a_page_do_what_it_says(page, reader):
    story = STORIES.get(page, shop)(reader)
    for block in blocks(page):
        for step in steps(block):
            if is_run(step):
                next(story, None)
                reader.follow(step)
    next(story, None)
    assert next(story, None) is None, "the story of the page is longer than the page"


@EACH_PAGE
def test_a_reader_knows_what_to_do_with_each_block_of_a_page(page):
    unknown = [step for block in blocks(page) for step in steps(block) if is_run(step) and not Reader.knows(step)]

    assert unknown == [], "let the reader do it, or list it in NOT_RUN with the reason"


def test_each_story_has_a_page():
    assert set(STORIES) <= {page for page in PAGES if blocks(page)}


def test_what_is_not_run_is_still_in_the_docs():
    found = [step for page in PAGES for block in blocks(page) for step in steps(block)]
    left_out = [step.text.removeprefix(".venv/bin/") for step in found if not is_run(step)]

    assert [beginning for beginning in NOT_RUN if not any(text.startswith(beginning) for text in left_out)] == []
    count = sum(len(blocks(page)) for page in PAGES)
    measured(f"{count} blocks with {len(found)} steps, of which {len(left_out)} are not run: {left_out}")
