"""The prefix index believes nothing that may be false."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.index import PrefixIndex, Slots, Underway
from tandem.messages import KvEvents
from tests.router.worlds import keys

CHAIN = keys("a", "b", "c", "d")


def index_of(*workers: str) -> PrefixIndex:
    index = PrefixIndex(Slots())
    for name in workers:
        index.add(name, "i1")
    return index


def news(number: int, *stored: bytes, worker: str = "w", **more: object) -> KvEvents:
    return KvEvents(worker, "i1", number, stored=stored, **more)  # type: ignore[arg-type]


def test_the_match_is_the_number_of_leading_keys_of_each_worker() -> None:
    index = index_of("w", "v", "u")
    assert index.apply(news(1, *CHAIN[:3]))
    assert index.apply(news(1, CHAIN[0], CHAIN[2], worker="v"))
    assert index.apply(news(1, CHAIN[1], worker="u"))
    assert index.match(CHAIN) == {"w": 3, "v": 1}
    index.check()


def test_a_removed_key_ends_the_match_there() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN))
    index.apply(news(2, removed=(CHAIN[1],)))
    assert index.match(CHAIN) == {"w": 1}


def test_a_gap_voids_what_is_known_and_later_news_count_again() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN[:2]))
    assert index.apply(news(3, CHAIN[2]))
    assert index.match(CHAIN) == {}
    assert index.incomplete() == ("w",)
    index.apply(news(4, CHAIN[0]))
    assert index.match(CHAIN) == {"w": 1}
    index.check()


def test_a_full_retelling_mends_a_gap() -> None:
    index = index_of("w")
    index.apply(news(5, CHAIN[2]))
    index.apply(news(6, *CHAIN, cleared=True))
    assert index.incomplete() == ()
    assert index.match(CHAIN) == {"w": 4}


def test_a_report_shows_a_gap_that_no_event_follows() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN))
    index.told_up_to("w", "i1", 1)
    assert index.match(CHAIN) == {"w": 4}
    index.told_up_to("w", "i0", 9)
    assert index.incomplete() == ()
    index.told_up_to("w", "i1", 2)
    assert (index.match(CHAIN), index.incomplete()) == ({}, ("w",))
    index.apply(news(3, *CHAIN[:3], cleared=True))
    assert (index.match(CHAIN), index.incomplete()) == ({"w": 3}, ())
    index.check()


def test_repeated_and_late_events_are_refused() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN))
    index.apply(news(2, removed=CHAIN))
    assert not index.apply(news(1, *CHAIN))
    assert not index.apply(news(2, *CHAIN))
    assert index.match(CHAIN) == {}


def test_an_old_incarnation_and_an_unknown_worker_are_refused() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN))
    index.add("w", "i2")
    assert index.match(CHAIN) == {}
    assert not index.apply(news(2, *CHAIN))
    assert not index.apply(news(1, *CHAIN, worker="stranger"))
    index.check()


def test_a_worker_that_leaves_takes_its_keys_along() -> None:
    index = index_of("w", "v")
    index.apply(news(1, *CHAIN))
    index.apply(news(1, *CHAIN, worker="v"))
    index.remove("w")
    assert index.match(CHAIN) == {"v": 4}
    index.check()


def test_tiers_are_told_apart() -> None:
    index = index_of("w")
    index.apply(news(1, *CHAIN[:1]))
    index.apply(news(2, *CHAIN, tier="host"))
    assert index.match(CHAIN) == {"w": 1}
    assert index.match(CHAIN, tier="host") == {"w": 4}
    assert index.match(CHAIN, tier="disk") == {}


def test_a_prefix_may_lie_in_several_tiers() -> None:
    index = index_of("w", "v")
    assert not index.has_lower_tiers()
    index.apply(news(1, *CHAIN[:2]))
    index.apply(news(2, CHAIN[2], tier="host"))
    index.apply(news(3, CHAIN[3], tier="disk"))
    index.apply(news(1, CHAIN[0], worker="v", tier="disk"))
    assert index.has_lower_tiers()
    assert index.match(CHAIN) == {"w": 2}
    assert index.match(CHAIN, tier=None) == {"w": 4, "v": 1}
    index.remove("w")
    assert index.match(CHAIN, tier=None) == {"v": 1}
    index.check()


def test_prefixes_underway_count_as_held_and_are_counted() -> None:
    slots = Slots()
    index, underway = PrefixIndex(slots), Underway(slots)
    index.add("w", "i1")
    index.apply(news(1, CHAIN[0]))
    underway.add("w", CHAIN[1:3])
    underway.add("w", CHAIN[1:2])
    assert index.match(CHAIN, underway=underway.masks) == {"w": 3}
    underway.remove("w", CHAIN[1:3])
    assert index.match(CHAIN, underway=underway.masks) == {"w": 2}
    underway.remove("w", CHAIN[1:2])
    assert index.match(CHAIN, underway=underway.masks) == {"w": 1}
    assert not underway.masks
    assert len(underway) == 0


def test_no_keys_match_nobody() -> None:
    assert index_of("w").match(()) == {}


ALPHABET = keys(*range(6))
EVENT = st.tuples(
    st.sampled_from(("u", "v", "w")),
    st.integers(1, 3),  # how far the number moves on: more than 1 is a gap
    st.lists(st.sampled_from(ALPHABET), max_size=4),
    st.lists(st.sampled_from(ALPHABET), max_size=4),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENT, max_size=25), st.lists(st.sampled_from(ALPHABET), max_size=6))
def test_the_index_never_claims_a_key_that_the_worker_does_not_hold(
    events: list[tuple[str, int, list[bytes], list[bytes], bool]], prompt: list[bytes]
) -> None:
    index = index_of("u", "v", "w")
    numbers = dict.fromkeys(("u", "v", "w"), 0)
    truth: dict[str, set[bytes]] = {name: set() for name in numbers}
    for name, step, stored, removed, cleared in events:
        numbers[name] += step
        if cleared or step > 1:
            truth[name] = set()  # what a gap hides may have been removed
        truth[name] = truth[name] - set(removed) | set(stored)
        assert index.apply(KvEvents(name, "i1", numbers[name], tuple(stored), tuple(removed), cleared))
        index.check()
    expected = {name: _leading(prompt, held) for name, held in truth.items()}
    assert index.match(prompt) == {name: depth for name, depth in expected.items() if depth}


def _leading(prompt: list[bytes], held: set[bytes]) -> int:
    depth = 0
    while depth < len(prompt) and prompt[depth] in held:
        depth += 1
    return depth
