"""Every setting: how it may be written, what it may hold, and what a wrong one says."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click import ClickException

from singlebeat import DuplicateTaskError
from singlebeat.config import Config
from singlebeat.errors import ConfigError, EntryError, LockBackendError, SinglebeatError
from tests.support import page

#: A right value for every setting, other than its default, and what is read from it.
RIGHT: dict[str, tuple[Any, Any]] = {
    "redbeat_redis_url": ("redis://there/1", "redis://there/1"),
    "redbeat_redis_options": ({"db": 3}, {"db": 3}),
    "redbeat_redis_use_ssl": ({"ssl_ca_certs": "ca.pem"}, {"ssl_ca_certs": "ca.pem"}),
    "redbeat_key_prefix": ("mine:", "mine:"),
    "redbeat_lock_key": ("redbeat:mine", "redbeat:mine"),
    "redbeat_lock_timeout": (7, 7.0),
    "redbeat_key_expiry_check": ("raise", "raise"),
    "singlebeat_other_app_check": ("raise", "raise"),
    "singleton_backend_url": ("redis://there/2", "redis://there/2"),
    "singleton_backend_class": ("a.module:Class", "a.module:Class"),
    "singleton_backend_kwargs": ({"username": "me"}, {"username": "me"}),
    "singleton_key_prefix": ("lock:", "lock:"),
    "singleton_raise_on_duplicate": (True, True),
    "singleton_lock_expiry": (60, 60.0),
    "singleton_on_backend_error": ("run", "run"),
    "singleton_json_encoder_class": ("a.module:Encoder", "a.module:Encoder"),
    "singlebeat_overlap": ("buffer_one", "buffer_one"),
    "singlebeat_lock_lease": (12.5, 12.5),
    "singlebeat_queued_ttl": (86400, 86400.0),
    "singlebeat_lost_after": (None, None),
    "singlebeat_socket_timeout": (0.5, 0.5),
    "singlebeat_watchdog_timeout": (None, None),
    "singlebeat_history_limit": (0, 0),
    "singlebeat_changes_limit": (0, 0),
    "singlebeat_allowed_tasks": (["shop.*"], ("shop.*",)),
    "singlebeat_masked_arguments": (["*card*"], ("*card*",)),
    "singlebeat_metrics_port": (9109, 9109),
    "singlebeat_metrics_host": ("0.0.0.0", "0.0.0.0"),
    "singlebeat_worker_metrics_port": (9110, 9110),
}

SECONDS = (0, -1, "10", True, float("nan"), float("inf"), 1e10, 1e300, timedelta(seconds=3), [], {}, b"1")
TEXT = ("", 1, True, b"text", [], {})
OPTIONS = (None, [], "text", 1, [("a", 1)])
WRONG: dict[str, tuple[Any, ...]] = {
    "redbeat_redis_url": TEXT,
    "redbeat_redis_options": OPTIONS,
    "redbeat_redis_use_ssl": ("yes", 1, []),
    "redbeat_key_prefix": (None, *TEXT),
    "redbeat_lock_key": (1, True, False, [], b"name"),
    "redbeat_lock_timeout": (None, *SECONDS),
    "redbeat_key_expiry_check": (None, "", "Warn", True, 1, [], {}),
    "singlebeat_other_app_check": (None, "", "Warn", "error", True, [], {}),
    "singleton_backend_url": TEXT,
    "singleton_backend_kwargs": OPTIONS,
    "singleton_key_prefix": (None, *TEXT),
    "singleton_raise_on_duplicate": ("yes", 1, 0, ""),
    "singleton_lock_expiry": SECONDS,
    "singleton_on_backend_error": ("", "ignore", True, 1, [], {}),
    "singleton_json_encoder_class": (5, "", "x", ".x", b"a.B", object(), []),
    "singlebeat_overlap": (None, "bufer_one", *TEXT),
    "singlebeat_lock_lease": (None, *SECONDS),
    "singlebeat_queued_ttl": (None, *SECONDS),
    "singlebeat_lost_after": SECONDS,
    "singlebeat_socket_timeout": (None, 1e6, *SECONDS),
    "singlebeat_watchdog_timeout": SECONDS,
    "singlebeat_history_limit": (None, -1, 10**30, 1.5, "10", True, []),
    "singlebeat_changes_limit": (None, -1, 10**30, 1.5, "10", True, []),
    "singlebeat_allowed_tasks": (None, "shop.*", [1], {}, True),
    "singlebeat_masked_arguments": (None, "*card*", [1], {}, True),
    "singlebeat_metrics_port": (0, -1, 65_536, "9109", 1.5, True, []),
    "singlebeat_metrics_host": (None, *TEXT),
    "singlebeat_worker_metrics_port": (0, -1, 65_536, "9110", 1.5, True, []),
}
#: Settings that take any value that the user may need.
UNCHECKED = {"singleton_backend_class"}


def app_with(conf: Mapping[str, Any] | None = None) -> Celery:
    app = Celery("test", set_as_current=False)
    app.conf.update(conf or {})
    return app


def read(conf: Mapping[str, Any]) -> Config:
    return Config.of(app_with(conf))


def test_these_tests_know_every_setting():
    names = {field.name for field in fields(Config)}

    assert set(RIGHT) == names
    assert set(WRONG) == names - UNCHECKED


def test_the_reference_prints_the_documentation_of_every_setting():
    prefixes = tuple(re.findall(r"^\.\. settings:: (\w+)$", page("reference/settings"), re.MULTILINE))

    for field in fields(Config):
        assert field.name.startswith(prefixes)
        assert re.fullmatch(r"[A-Z].*\.", field.metadata["doc"])
        assert ("float" in field.type) == (field.metadata["unit"] == "seconds")


@pytest.mark.parametrize("name", RIGHT)
def test_an_example_is_not_the_default(name):
    assert getattr(read({}), name) != RIGHT[name][1]


# ---------------------------------------------------------------- spellings

SPELLINGS: dict[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "upper case": str.upper,
    "with Celery's namespace": lambda name: f"CELERY_{name.upper()}",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("name", RIGHT)
def test_every_setting_is_read_in_every_spelling(name, spelling):
    value, expected = RIGHT[name]

    assert getattr(read({spelling(name): value}), name) == expected


def namespaced(prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name.upper()}": value for name, (value, _) in RIGHT.items()}


def all_read(app: Celery) -> bool:
    config = Config.of(app)
    return {name: getattr(config, name) for name in RIGHT} == {name: expected for name, (_, expected) in RIGHT.items()}


@pytest.mark.parametrize("namespace", ["CELERY", "MYAPP"])
def test_every_setting_is_read_from_an_object_with_a_namespace(namespace):
    app = app_with()
    app.config_from_object(SimpleNamespace(**namespaced(f"{namespace}_")), namespace=namespace)

    assert all_read(app)


def test_every_setting_is_read_from_a_module_with_a_namespace(monkeypatch):
    module = ModuleType("a_project_settings")
    vars(module).update(namespaced("CELERY_"), DEBUG=True, INSTALLED_APPS=[], CELERY_TIMEZONE="Europe/Berlin")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    app = app_with()
    app.config_from_object("a_project_settings", namespace="CELERY")

    assert all_read(app)
    assert app.conf.timezone == "Europe/Berlin"


def test_every_setting_is_read_from_an_object_without_a_namespace():
    app = app_with()
    app.config_from_object(SimpleNamespace(**{name: value for name, (value, _) in RIGHT.items()}))

    assert all_read(app)


def test_every_setting_is_read_beside_a_namespace():
    app = app_with()
    app.config_from_object(SimpleNamespace(CELERY_BROKER_URL="memory://", **namespaced("")), namespace="CELERY")

    assert all_read(app)


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_an_error_that_names_its_setting(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} must be ") as caught:
        read({name: value})

    assert f"not {value!r}" in str(caught.value) or f"not a value of type {type(value).__name__}" in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redbeat_redis_url", ["redis://:geheim@h", "redis://user:geheim@i/0"]),
        ("redbeat_redis_url", {"host": "h", "password": "geheim"}),
        ("redbeat_redis_url", b"unix:///run/s?password=geheim"),
        ("singleton_backend_url", ("rediss://:ge heim@h/1",)),
        ("redbeat_redis_options", [("password", "geheim")]),
        ("redbeat_redis_use_ssl", "ssl_password=geheim"),
        ("singleton_backend_kwargs", "password=geheim"),
        ("singleton_backend_kwargs", ("geheim",)),
    ],
)
def test_a_wrong_value_is_shown_without_its_password(name, value):
    with pytest.raises(
        ConfigError, match=rf"^{name} must be .*, not a value of type {type(value).__name__}$"
    ) as caught:
        read({name: value})

    assert "heim" not in str(caught.value)


def test_a_wrong_value_is_named_however_it_was_spelled():
    with pytest.raises(ConfigError, match=r"^singlebeat_lock_lease must be"):
        read({"CELERY_SINGLEBEAT_LOCK_LEASE": "soon"})


@pytest.mark.parametrize(
    ("conf", "unknown"),
    [
        ({"singlebeat_lock_leese": 1}, "singlebeat_lock_leese"),
        ({"SINGLEBEAT_LOCK_LEESE": 1}, "singlebeat_lock_leese"),
        ({"CELERY_SINGLEBEAT_LOCK_LEESE": 1}, "singlebeat_lock_leese"),
        ({"singlebeat_lease": 1}, "singlebeat_lease"),
    ],
)
def test_a_misspelled_setting_is_an_error_that_knows_the_right_name(conf, unknown):
    with pytest.raises(ConfigError, match=rf"^unknown setting {unknown}; did you mean singlebeat_lock_lease\?$"):
        read(conf)


@pytest.mark.parametrize("namespace", ["CELERY", None])
def test_the_setting_of_the_page_in_django_is_none_of_celery(namespace):
    app = app_with()
    app.config_from_object(SimpleNamespace(SINGLEBEAT_WEB={"read_only": True}), namespace=namespace)

    assert Config.of(app) == Config()


@pytest.mark.parametrize("namespace", ["CELERY", "MYAPP"])
def test_a_misspelled_setting_is_found_behind_a_namespace(namespace):
    app = app_with()
    app.config_from_object(SimpleNamespace(**{f"{namespace}_SINGLEBEAT_QUEUD_TTL": 1}), namespace=namespace)

    with pytest.raises(ConfigError, match="unknown setting singlebeat_queud_ttl; did you mean singlebeat_queued_ttl"):
        Config.of(app)


def test_a_name_that_is_like_none_gets_no_advice():
    with pytest.raises(ConfigError, match="^unknown setting singlebeat_" + "x" * 40 + "$"):
        read({"singlebeat_" + "x" * 40: 1})


def test_the_names_of_others_are_left_to_them():
    assert read({"redbeat_of_another_version": 1, "singletons": 2, "my_singlebeat_thing": 3}) == read({})


# ---------------------------------------------------------------- reading


def test_settings_are_read_once_for_each_app():
    app, other = app_with({"singlebeat_lock_lease": 1}), app_with({"singlebeat_lock_lease": 2})
    config = Config.of(app)

    app.conf.singlebeat_lock_lease = 3

    assert Config.of(app) is config
    assert (config.singlebeat_lock_lease, Config.of(other).singlebeat_lock_lease) == (1, 2)
    assert Config.read(app).singlebeat_lock_lease == 3


def test_an_error_is_not_kept():
    app = app_with({"singlebeat_lock_lease": "soon"})
    with pytest.raises(ConfigError):
        Config.of(app)

    app.conf.singlebeat_lock_lease = 3

    assert Config.of(app).singlebeat_lock_lease == 3


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError):
        read({}).singlebeat_lock_lease = 1


# ---------------------------------------------------------------- the leader's lock


@pytest.mark.parametrize(
    ("conf", "key"),
    [
        ({}, "redbeat::lock"),
        ({"redbeat_key_prefix": "mine:"}, "mine::lock"),
        ({"redbeat_lock_key": None}, None),
        ({"redbeat_lock_key": ""}, None),
        ({"redbeat_lock_key": "leader"}, "redbeat:leader"),
        ({"redbeat_lock_key": "redbeat:leader"}, "redbeat:leader"),
        ({"redbeat_lock_key": "redbeat:leader", "redbeat_key_prefix": "mine:"}, "mine:redbeat:leader"),
    ],
)
def test_the_key_of_the_leaders_lock_follows_redbeats_rule(conf, key):
    assert read(conf).lock_key == key


def test_the_key_of_the_leaders_lock_is_that_of_redbeat():
    from redbeat.schedulers import RedBeatConfig

    for conf in ({}, {"redbeat_lock_key": None}, {"redbeat_lock_key": ""}, {"redbeat_lock_key": "leader"}):
        for prefix in ({}, {"redbeat_key_prefix": "mine:"}, {"redbeat_key_prefix": "leader"}):
            both = {"redbeat_redis_url": "redis://h", "redbeat_redis_options": {}, **conf, **prefix}
            assert read(both).lock_key == (RedBeatConfig(app_with(both)).lock_key or None)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", [ConfigError, EntryError, LockBackendError, SinglebeatError])
def test_an_error_survives_the_way_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("set it to 1")))

    assert type(error) is kind
    assert str(error) == "set it to 1"


def test_a_duplicate_task_error_takes_the_id_of_the_holder_along():
    error = pickle.loads(pickle.dumps(DuplicateTaskError("an equal call is queued as task x", "x")))

    assert isinstance(error, DuplicateTaskError)
    assert (str(error), error.message, error.task_id) == (*["an equal call is queued as task x"] * 2, "x")


def test_every_error_has_the_one_base():
    assert all(issubclass(e, SinglebeatError) for e in (ConfigError, DuplicateTaskError, EntryError, LockBackendError))


def test_a_config_error_is_one_line_of_the_celery_command(capsys):
    error = pickle.loads(pickle.dumps(ConfigError("set it to 1")))

    assert isinstance(error, ClickException)
    error.show()
    assert capsys.readouterr().err == "Error: set it to 1\n"
