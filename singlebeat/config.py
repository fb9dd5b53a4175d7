"""Every setting: its name, default, meaning and check, read from a Celery app.

RedBeat's ``redbeat_*`` and celery-singleton's ``singleton_*`` names keep their meaning; new settings are called
``singlebeat_*``. Each name is accepted in lower and upper case, with or without the namespace of the app's
configuration (``CELERY_REDBEAT_REDIS_URL`` in Django).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .errors import ConfigError
from .overlap import Overlap

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.utils import Settings

__all__ = ("MOST_SECONDS", "Config")

#: Options of a client or of a class; that client or class checks their types.
_Options = Mapping[str, Any]

#: Seconds of the leader's lease when ``redbeat_lock_timeout`` is not set.
DEFAULT_LEADER_LEASE = 10.0


#: Upper bounds: a thread cannot wait much longer, a socket cannot wait a month, and Redis refuses larger numbers.
MOST_SECONDS, MOST_PATIENCE, MOST = 100 * 365 * 86_400, 86_400, 10**9


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError("must be a positive number of seconds")
    if value > MOST_SECONDS:
        raise ValueError("must be 100 years at most, in seconds")
    return float(value)


def _patience(value: object) -> float:
    if (seconds := _seconds(value)) > MOST_PATIENCE:
        raise ValueError("must be a day at most, 86,400 seconds")
    return seconds


def _seconds_or_none(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError("must be a whole number, 0 to 1,000,000,000")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _lock_name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("must be a string, or None for no lock")
    return value or None  # as in RedBeat, an empty string means no lock


def _options(value: object) -> _Options:
    if not isinstance(value, Mapping):
        raise ValueError("must be a dict")  # noqa: TRY004 - a wrong value, as far as the user is concerned
    return value


def _flag_or_none(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ValueError("must be True or False")


def _ssl(value: object) -> _Options | bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    return _options(value)


def _backend_error(value: object) -> str | None:
    if value not in (None, "raise", "run"):
        raise ValueError("must be 'raise' or 'run'")
    return None if value is None else str(value)


def _expiry_check(value: object) -> str:
    if value not in ("ignore", "warn", "error", "raise"):
        raise ValueError("must be 'ignore', 'warn', 'error' or 'raise'")
    return str(value)


def _other_app_check(value: object) -> str:
    if value not in ("ignore", "warn", "raise"):
        raise ValueError("must be 'ignore', 'warn' or 'raise'")
    return str(value)


def _overlap(value: object) -> Overlap:
    if value not in list(Overlap):
        raise ValueError(f"must be one of {', '.join(Overlap)}")
    return Overlap(str(value))


def _port(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65_536:
        raise ValueError("must be a port, 1 to 65535")
    if find_spec("prometheus_client") is None:
        raise ValueError("needs prometheus_client (pip install 'celery-singlebeat[prometheus]')")
    return value


def _patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError("must be a list of strings, such as ['shop.*']")
    return tuple(value)


def _class(value: object) -> type | str | None:
    # A path is imported only when it is needed, because its module may need the app.
    if value is None or isinstance(value, type) or (isinstance(value, str) and re.fullmatch(r"\w[\w.]*[.:]\w+", value)):
        return value
    raise ValueError("must be a class, or the path of a class, such as 'shop.json:Encoder'")


def _anything(value: object) -> object:
    return value


def _setting(
    default: object, check: Callable[[object], object], doc: str, *, unit: str = "", fallback: str = ""
) -> Any:
    """Return the field of a setting; its page in the docs is made from the metadata.

    Args:
        doc: what the setting means, for users, in reStructuredText.
        unit: of a number.
        fallback: what applies while the setting has its default, if the default does not say so itself.
    """
    metadata = {"check": check, "doc": doc, "unit": unit, "fallback": fallback}
    return field(default_factory=lambda: default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one app, checked; a field is named like the setting."""

    redbeat_redis_url: str | None = _setting(
        None, _text_or_none, "The URL of the server that keeps the schedule.", fallback="``broker_url``"
    )
    redbeat_redis_options: _Options = _setting(
        {},
        _options,
        "The options of the schedule's Redis client, such as ``socket_timeout``, ``sentinels`` and ``service_name``.",
    )
    redbeat_redis_use_ssl: _Options | bool = _setting(
        False,
        _ssl,
        "The TLS options of that client.",
        fallback="``broker_use_ssl`` if the URL is the broker's",
    )
    redbeat_key_prefix: str = _setting("redbeat:", _text, "The prefix of every key of the schedule.")
    redbeat_lock_key: str | None = _setting(
        "",
        _lock_name,
        "The key of the leader's lock. With ``None`` no beat leads, and all beats share the work. Then ``health`` and "
        "``/readyz`` fail if no beat has worked for 30 s. ``status`` and ``doctor`` name the beats that work, and name "
        "a dead beat for 5 s: probe the ``/healthz`` of each beat (:ref:`share`).",
        fallback="``<prefix>:lock``",
    )
    redbeat_lock_timeout: float = _setting(
        DEFAULT_LEADER_LEASE,
        _seconds,
        "How long leadership outlives a leader that died. Then a standby leads.",
        unit="seconds",
    )
    redbeat_key_expiry_check: str = _setting(
        "warn",
        _expiry_check,
        "The reaction if the schedule's server may evict keys: ``ignore``; ``warn`` and ``error``, which log at that "
        "level; or ``raise``, which ends beat.",
    )
    singleton_backend_url: str | None = _setting(
        None,
        _text_or_none,
        "The URL of the server that keeps the locks.",
        fallback="``result_backend``, else ``broker_url``, else ``redbeat_redis_url``",
    )
    singleton_backend_class: object = _setting(
        None,
        _anything,
        "The class of the lock backend, or its dotted path.",
        fallback="``singlebeat.locks.redis.RedisBackend``",
    )
    singleton_backend_kwargs: _Options = _setting({}, _options, "The keyword arguments for that class.")
    singleton_key_prefix: str = _setting("SINGLETONLOCK_", _text, "The prefix of every lock.")
    singleton_raise_on_duplicate: bool | None = _setting(
        None,
        _flag_or_none,
        "Whether a duplicate call raises ``DuplicateTaskError``. Otherwise it returns the result of the holder. A "
        "task's own option wins.",
    )
    singleton_lock_expiry: float | None = _setting(
        None,
        _seconds_or_none,
        "How long after a call its lock ends, in every Singleton, even if the task still runs. With ``None`` the lock "
        "lasts as long as its run. A task's own option wins.",
        unit="seconds",
    )
    singleton_on_backend_error: str | None = _setting(
        None,
        _backend_error,
        "What a Singleton does while the locks' server is unreachable. ``raise``: a call raises, and a worker puts a "
        "start off by 5 s. ``run``: both go on without a lock. ``None``: a call raises, unless another one waits "
        "for it (in a chain, chord or group, with ``link``): it is sent, and takes its lock at its start. And a start "
        "runs, but is put off if it waits for another run, or if calls with other arguments may have joined it. Plain "
        "tasks run unless they wait for their turn. Occurrences that beat has to send stay pending.",
    )
    singleton_json_encoder_class: type | str | None = _setting(
        None, _class, "The JSON encoder for the arguments in unique keys, or its dotted path.", fallback="kombu's"
    )
    singlebeat_overlap: Overlap = _setting(
        Overlap.SKIP,
        _overlap,
        "The policy for the duplicate calls of a Singleton that sets no ``overlap`` itself.",
    )
    singlebeat_lock_lease: float = _setting(
        30.0, _seconds, "How long the lock of a running task outlives its worker.", unit="seconds"
    )
    singlebeat_queued_ttl: float = _setting(
        3600.0,
        _seconds,
        "How long a lock waits for its message to start, in addition to countdown and eta. The ends of runs are "
        "remembered as long.",
        unit="seconds",
    )
    singlebeat_lost_after: float | None = _setting(
        30.0,
        _seconds_or_none,
        "After how long beat checks whether the message of a queued lock is gone. ``None``: never.",
        unit="seconds",
    )
    singlebeat_socket_timeout: float = _setting(
        5.0, _patience, "How long one call to Redis may take. Leases use shorter timeouts.", unit="seconds"
    )
    singlebeat_watchdog_timeout: float | None = _setting(
        60.0,
        _seconds_or_none,
        "After how long without progress beat ends, with its stacks in the log, so that a standby leads. ``None``: "
        "never.",
        unit="seconds",
    )
    singlebeat_history_limit: int = _setting(
        10_000, _count, "How many decisions of beat, and how many ends of runs, are kept. 0 keeps none.", unit="records"
    )
    singlebeat_changes_limit: int = _setting(
        10_000,
        _count,
        "How many changes of entries are kept, with definition and policy before and after. 0 keeps none.",
        unit="records",
    )
    singlebeat_allowed_tasks: tuple[str, ...] = _setting(
        ("*",),
        _patterns,
        "Patterns of the names of the tasks that entries may run. An entry with another task is quarantined.",
    )
    singlebeat_masked_arguments: tuple[str, ...] = _setting(
        ("*password*", "*passwd*", "*token*", "*secret*", "*api?key*", "*apikey*", "*authorization*", "*credential*"),
        _patterns,
        "Patterns of the names of the arguments whose values are shown as ``**``, in any case and to any depth: in "
        "commands, in the record of a lock and in the log (:ref:`masking`). If there is one, URLs with passwords are "
        "masked, too.",
    )
    singlebeat_other_app_check: str = _setting(
        "warn",
        _other_app_check,
        "The reaction if a beat leads over the entries of another app, or stands by for the beat of another app: "
        "``ignore``, ``warn``, or ``raise``, which ends that beat.",
    )
    singlebeat_metrics_port: int | None = _setting(
        None, _port, "The port on which beat serves ``/metrics``, ``/healthz`` and ``/readyz``. ``None``: no port."
    )
    singlebeat_metrics_host: str = _setting(
        "127.0.0.1", _text, "The address of the metrics ports of beat and of the workers."
    )
    singlebeat_worker_metrics_port: int | None = _setting(
        None,
        _port,
        "The port on which a worker serves ``/metrics``. Each worker of a host needs its own. ``None``: no port.",
    )

    @classmethod
    def of(cls, app: Celery) -> Config:
        """Return the settings of an app, read and checked on first use.

        Raises:
            ConfigError: a value is wrong, or a ``singlebeat_`` name is unknown; the message names it.
        """
        config = _configs.get(app)
        if config is None:
            config = _configs[app] = cls.read(app)
        return config

    @classmethod
    def read(cls, app: Celery) -> Config:
        """Read and check the settings of an app anew."""
        conf: Settings = app.conf
        settings = {f.name: f for f in fields(cls)}
        for name in _own_names(conf):
            if name not in settings:
                near = difflib.get_close_matches(name, settings, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown setting {name}{hint}")
        values: dict[str, Any] = {}
        for name, setting in settings.items():
            for spelling in (name, name.upper(), f"CELERY_{name.upper()}"):
                if spelling in conf:
                    values[name] = _checked(name, setting.metadata["check"], conf[spelling])
                    break
        return cls(**values)

    @property
    def lock_key(self) -> str | None:
        """Return the key of the leader's lock, prefixed by RedBeat's rule, or None if the lock is switched off."""
        if self.redbeat_lock_key is None:
            return None
        key = self.redbeat_lock_key or ":lock"
        return key if key.startswith(self.redbeat_key_prefix) else self.redbeat_key_prefix + key


_configs: WeakKeyDictionary[Celery, Config] = WeakKeyDictionary()

#: Django's own setting for the page: an app that is configured from Django's settings has it, too.
_DJANGO_SETTING = "singlebeat_web"


def _own_names(conf: Settings) -> Iterator[str]:
    """Yield the names in the configuration that begin with ``singlebeat_``, in lower case and without namespace."""
    for key in conf.keys():  # noqa: SIM118 - not a dict: iterating it yields deprecated names, too
        name = str(key).lower()
        for namespace in ((conf.prefix or "").lower(), "celery_"):
            name = name.removeprefix(namespace)
        if name.startswith("singlebeat_") and name != _DJANGO_SETTING:
            yield name


def _checked(name: str, check: Callable[[object], object], value: object) -> object:
    try:
        return check(value)
    except ValueError as exc:
        # These settings may hold a password, which cannot be found in an invalid value and masked.
        is_secret = value and name.endswith(("_url", "_options", "_use_ssl", "_kwargs"))
        shown = f"a value of type {type(value).__name__}" if is_secret else repr(value)
        raise ConfigError(f"{name} {exc}, not {shown}") from None
