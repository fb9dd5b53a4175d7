"""The parts of beats that share the work: at each moment disjoint, complete in turns, and steady."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest

from singlebeat.beat.share import ALL, PAUSE, TURN, Share

#: More bytes than UTF-8 knows, as a name may have.
KEYS = [*(f"redbeat:entry {number}" for number in range(4000)), "redbeat:\udcff", ""]


@cache
def shares(count: int) -> Sequence[Share]:
    names = {f"host:{4000 + number}" for number in range(count)}
    return [Share(name, frozenset(names - {name})) for name in sorted(names)]


def owners(count: int, late: float, keys: Sequence[str] = KEYS) -> dict[str, str]:
    """Return the beat that has each key in its part; a key that two of them have fails."""
    found = [(key, share.beat) for share in shares(count) for key in keys if share.has(key, late)]
    assert len(found) == len({key for key, _ in found}), "in two parts"
    return dict(found)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("late", [-3600, 0, TURN - 0.001, TURN + PAUSE, 5 * TURN - 0.001, 1e9 + PAUSE])
def test_the_parts_of_all_beats_are_disjoint_and_complete(count, late):
    assert len(owners(count, late)) == len(KEYS)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_parts_of_all_beats_are_of_like_size(count):
    sizes = Counter(owners(count, 0).values())

    assert all(0.8 < size * count / len(KEYS) < 1.2 for size in sizes.values()), sizes


def test_a_beat_that_leaves_or_joins_changes_no_part_but_its_own():
    three, four = owners(3, 0), owners(4, 0)

    moved = {four[key] for key in KEYS if three[key] != four[key]}

    assert moved == {"host:4003"}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_late_work_comes_into_the_part_of_each_beat_in_turn(count):
    turns = [owners(count, number * TURN + PAUSE) for number in range(count + 1)]

    for key in KEYS:
        assert len({turn[key] for turn in turns[:-1]}) == count
        assert turns[0][key] == turns[-1][key]


@pytest.mark.parametrize("count", [2, 8])
def test_no_beat_takes_over_at_the_moment_in_which_another_one_still_works(count):
    moments = [owners(count, late / 10, KEYS[:20]) for late in range(int(30 * TURN))]

    for before, after in pairwise(moments):
        assert all(before.get(key, beat) == beat for key, beat in after.items())
    assert sum(not moment for moment in moments) == 10 * PAUSE * 2


def test_a_beat_that_works_alone_has_all_at_any_time():
    assert all(ALL.has(key, late) for key in KEYS for late in (-1, 0, TURN, TURN + PAUSE / 2))
