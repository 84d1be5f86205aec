"""Health, told with a clock that the test holds."""

from __future__ import annotations

from cluster.membership import Decision, Fence, GiveUp, Health, HealthBounds, Kill, Membership, Restart
from tandem.messages import WorkerRef

BOUNDS = HealthBounds(suspect_s=2, fence_s=6, start_s=60, backoff_s=1, backoff_max_s=4, stable_s=30)


def ref(incarnation: str) -> WorkerRef:
    return WorkerRef("w", incarnation, "host:1")


def alive() -> Membership:
    members = Membership(BOUNDS)
    assert members.joined(ref("i1"), 0.0)
    return members


def fail_to_start(members: Membership, now: float) -> tuple[Decision, ...]:
    members.exited("w", "", "exit code 1", now)
    return members.tick(now)


def test_a_worker_that_is_heard_stays_alive() -> None:
    members = alive()
    for now in range(1, 100):
        assert members.heard("w", "i1", now)
        assert members.tick(now) == ()
    assert members.usable("w")


def test_silence_makes_suspect_then_fenced_killed_and_restarted() -> None:
    members = alive()
    assert members.tick(2.0) == ()
    assert members.health("w") is Health.SUSPECT
    assert not members.usable("w")
    assert members.late("w")
    decisions = members.tick(6.0)
    assert decisions[:2] == (Fence("w", "i1", "silent for 6.0 s"), Kill("w", "i1"))
    assert not members.late("w")
    assert members.tick(6.5) == ()
    assert members.tick(7.0) == (Restart("w", 2),)
    assert members.joined(ref("i2"), 8.0)
    assert members.usable("w")


def test_a_worker_whose_reports_are_lost_but_whose_control_shows_up_is_a_last_choice_and_stays() -> None:
    members = alive()
    for now in range(1, 60):
        assert members.present("w", "i1", now)
        assert members.tick(now) == ()
    assert not members.usable("w")
    assert members.late("w")
    assert not members.present("w", "i0", 60)
    assert Fence("w", "i1", "silent for 65.0 s") in members.tick(65.0)
    assert not members.present("w", "i1", 65)


def test_a_suspect_that_is_heard_again_is_alive() -> None:
    members = alive()
    members.tick(3.0)
    assert members.heard("w", "i1", 3.5)
    assert members.usable("w")
    assert members.tick(4.0) == ()


def test_an_old_incarnation_is_refused_everywhere() -> None:
    members = alive()
    members.tick(6.0)
    assert not members.heard("w", "i1", 6.1)
    assert not members.joined(ref("i1"), 6.2)
    members.joined(ref("i2"), 7.0)
    assert not members.heard("w", "i1", 7.1)
    assert not members.joined(ref("i1"), 7.2)
    members.accused("w", "i1", "refused", 7.3)
    members.exited("w", "i1", "late news", 7.4)
    assert members.usable("w")


def test_an_accused_worker_gets_nothing_until_it_is_heard_again() -> None:
    members = alive()
    members.accused("w", "i1", "connection refused", 0.5)
    assert not members.usable("w")
    assert not members.late("w")
    members.heard("w", "i1", 1.0)
    assert members.usable("w")


def test_repeated_accusations_fence_though_the_heart_beats() -> None:
    members = alive()
    for now in (1.0, 2.0, 3.0):
        members.accused("w", "i1", "no answer", now)
        members.heard("w", "i1", now + 0.5)
    kinds = [type(decision) for decision in members.tick(3.6)]
    assert kinds == [Fence, Kill]


def test_many_accusations_of_one_incident_are_one() -> None:
    members = alive()
    members.heard("w", "i1", 0.9)
    for _ in range(8):
        members.accused("w", "i1", "the transfer hung", 1.0)
    assert members.tick(1.1) == ()
    assert members.heard("w", "i1", 1.2)
    assert members.usable("w")


def test_accusations_with_peace_between_them_are_forgotten() -> None:
    members = alive()
    for now in (1.0, 41.0, 81.0, 121.0):
        members.heard("w", "i1", now - 0.1)
        members.accused("w", "i1", "no answer", now)
        assert members.heard("w", "i1", now + 0.1)
    assert members.usable("w")


def test_a_dead_process_is_fenced_at_once() -> None:
    members = alive()
    members.exited("w", "i1", "killed by signal 9", 1.0)
    assert not members.usable("w")
    assert members.tick(1.0) == (Fence("w", "i1", "killed by signal 9"), Kill("w", "i1"))


def test_restarts_back_off_and_stop_after_repeated_failures_to_start() -> None:
    members = Membership(BOUNDS)
    members.expect("w", 0.0)
    assert fail_to_start(members, 1.0) == (Kill("w", ""),)
    assert members.tick(1.9) == ()
    assert members.tick(2.0) == (Restart("w", 2),)
    fail_to_start(members, 3.0)
    assert members.tick(4.9) == ()
    assert members.tick(5.0) == (Restart("w", 3),)
    kill, give_up = fail_to_start(members, 6.0)
    assert kill == Kill("w", "")
    assert isinstance(give_up, GiveUp)
    assert "exit code 1" in give_up.why
    assert members.tick(1000.0) == ()
    assert members.health("w") is Health.FAILED


def test_a_worker_that_never_joins_failed_to_start() -> None:
    members = Membership(BOUNDS)
    members.expect("w", 0.0)
    assert members.tick(59.0) == ()
    assert members.tick(60.0) == (Kill("w", ""),)


def test_who_dies_soon_after_each_start_comes_back_after_longer_pauses_and_is_not_given_up() -> None:
    members = Membership(BOUNDS)
    now, pauses = 0.0, []
    for attempt in range(8):
        assert members.joined(ref(f"i{attempt}"), now)
        died_s = now + 1.0
        members.exited("w", f"i{attempt}", "crashed", died_s)
        assert [type(decision) for decision in members.tick(died_s)] == [Fence, Kill]
        now = next(died_s + wait_s for wait_s in range(100) if members.tick(died_s + wait_s))
        pauses.append(now - died_s)
    assert pauses == [1, 2, 4, 4, 4, 4, 4, 4]


def test_a_start_that_fails_after_short_lives_is_the_first_to_fail() -> None:
    members = Membership(BOUNDS)
    for attempt in range(4):
        assert members.joined(ref(f"i{attempt}"), attempt * 40.0)
        members.exited("w", f"i{attempt}", "crashed", attempt * 40.0 + 1.0)
        members.tick(attempt * 40.0 + 1.0)
    assert [type(decision) for decision in members.tick(200.0)] == [Restart]
    assert fail_to_start(members, 201.0) == (Kill("w", ""),)
    assert members.health("w") is Health.FENCED


def test_a_long_life_forgives_earlier_failures() -> None:
    members = Membership(BOUNDS)
    for attempt in range(10):
        now = attempt * 100.0
        assert members.joined(ref(f"i{attempt}"), now)
        members.heard("w", f"i{attempt}", now + 40.0)
        members.exited("w", f"i{attempt}", "crashed", now + 41.0)
        assert not any(isinstance(decision, GiveUp) for decision in members.tick(now + 41.0))


def test_a_given_up_worker_that_joins_by_itself_is_welcome() -> None:
    members = Membership(BOUNDS)
    members.expect("w", 0.0)
    for now in (1.0, 10.0, 20.0):
        fail_to_start(members, now)
        members.tick(now + 5)
    assert members.health("w") is Health.FAILED
    assert members.joined(ref("i9"), 30.0)
    assert members.usable("w")


def test_a_new_incarnation_fences_the_one_before() -> None:
    members = alive()
    assert members.joined(ref("i2"), 1.0)
    assert members.tick(1.0) == (Fence("w", "i1", "replaced by a new incarnation"),)
    assert not members.heard("w", "i1", 1.1)
    assert members.heard("w", "i2", 1.1)


def test_each_decision_is_handed_out_once() -> None:
    members = alive()
    assert members.tick(6.0)
    assert members.tick(6.0) == ()


def test_the_story_of_a_worker_can_be_read() -> None:
    members = alive()
    members.tick(6.0)
    (member,) = members.members()
    assert [line.split(" ", 1)[1] for line in member.story] == ["alive: joined as i1", "fenced: silent for 6.0 s"]
