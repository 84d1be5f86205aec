"""A router that answers nobody is ended once, and one that is away is left to Ray."""

from __future__ import annotations

from cluster.processes import Process
from cluster.router_host import Whereabouts
from cluster.router_watch import MOST_MISSED, RouterWatch

HERE = Whereabouts("node", Process(7, 70))


def missed(watch: RouterWatch, times: int) -> list[Whereabouts | None]:
    return [watch.missed() for _ in range(times)]


def test_the_process_last_heard_of_is_to_be_killed_once_after_enough_silence() -> None:
    watch = RouterWatch()
    watch.heard(HERE)
    assert missed(watch, 3 * MOST_MISSED) == [None] * (MOST_MISSED - 1) + [HERE] + [None] * 2 * MOST_MISSED


def test_an_answer_starts_the_count_anew() -> None:
    watch = RouterWatch()
    for _ in range(3):
        watch.heard(HERE)
        assert missed(watch, MOST_MISSED - 1) == [None] * (MOST_MISSED - 1)


def test_a_router_never_heard_of_or_known_to_be_away_is_not_killed() -> None:
    watch = RouterWatch()
    assert missed(watch, 2 * MOST_MISSED) == [None] * 2 * MOST_MISSED
    watch.heard(HERE)
    watch.away()
    assert missed(watch, 2 * MOST_MISSED) == [None] * 2 * MOST_MISSED
