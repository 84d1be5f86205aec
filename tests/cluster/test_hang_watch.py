"""One that answers nobody is found out once, and one that is away has time to come back."""

from __future__ import annotations

from cluster.hang_watch import MOST_AWAITED, MOST_MISSED, HangWatch, Hung
from cluster.processes import Process
from cluster.router_host import Whereabouts

HERE = Whereabouts("node", Process(7, 70))


def missed(watch: HangWatch, times: int) -> list[Hung | None]:
    return [watch.missed() for _ in range(times)]


def test_the_process_last_heard_of_hangs_after_enough_silence_and_is_told_once() -> None:
    watch = HangWatch()
    watch.heard(HERE)
    assert missed(watch, MOST_MISSED) == [None] * (MOST_MISSED - 1) + [Hung(HERE)]
    assert missed(watch, MOST_AWAITED - 1) == [None] * (MOST_AWAITED - 1)


def test_any_news_starts_the_count_anew() -> None:
    watch = HangWatch()
    for _ in range(3):
        watch.heard(HERE)
        assert missed(watch, MOST_MISSED - 1) == [None] * (MOST_MISSED - 1)


def test_one_that_was_not_heard_since_it_was_away_has_longer_and_where_it_is_nobody_knows() -> None:
    watch = HangWatch()
    watch.heard(HERE)
    assert watch.missed() is None
    assert watch.away() is None
    assert not watch.knows
    assert missed(watch, MOST_AWAITED - 1) == [None] * (MOST_AWAITED - 2) + [Hung(None)]


def test_one_that_stays_away_for_too_long_hangs_in_its_start() -> None:
    watch = HangWatch()
    watch.heard(HERE)
    assert [watch.away() for _ in range(MOST_AWAITED)] == [None] * (MOST_AWAITED - 1) + [Hung(None)]


def test_one_that_was_never_heard_at_all_is_awaited_as_long_as_one_says() -> None:
    watch = HangWatch(most_awaited=90)
    assert missed(watch, 180) == ([None] * 89 + [Hung(None)]) * 2
