"""What beat keeps of the entries that it has read."""

from __future__ import annotations

from singlebeat.beat.store import latest
from singlebeat.beat.store.latest import Latest


def test_an_edited_entry_takes_the_place_of_its_former_definition():
    kept = Latest[int]()
    for number in range(100):
        kept.keep("e", (f"definition {number}",), number)

    assert kept.of("e", ("definition 99",)) == 99
    assert kept.of("e", ("definition 98",)) is None
    assert len(kept._kept) == 1


def test_what_is_kept_is_bounded_by_its_size_and_its_number(monkeypatch):
    monkeypatch.setattr(latest, "MOST_MEMBERS", 4)
    monkeypatch.setattr(latest, "MOST_CHARACTERS", 100)
    for length in (1, 40):
        kept = Latest[int]()
        for number in range(50):
            kept.keep(f"e{number}", ("x" * length, ""), number)

            assert kept.of(f"e{number}", ("x" * length, "")) == number
            assert len(kept._kept) <= 4
            assert sum(len(texts[0]) for texts, _ in kept._kept.values()) <= 140
