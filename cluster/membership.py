"""Who is alive: the health of every worker as a state machine without I/O.

    starting ──joined──▶ alive ◀──heard── suspect        accused, or silent for `suspect_s`
       │ too long,         └──────────────▶ │
       │ failed to start                    │ silent for `fence_s`, accused too often, or its process is gone
       ▼                                    ▼
    fenced ──after a back-off──▶ starting (Restart)      and after `max_start_failures` starts in a row: failed (GiveUp)

Whoever drives it feeds in what happened and calls `tick`; out come decisions: `Fence` (nothing of this incarnation is
accepted any more), `Kill`, `Restart`, `GiveUp`. An incarnation that was fenced is refused for ever, so a process that
wakes from SIGSTOP finds that it is nobody. A worker that joins by itself (Ray restarted it) is welcome from every state
with a new incarnation. Whoever dies before `stable_s` of life is started again after a longer pause each time; given up
is only who did not even join.

A worker's reports are its heartbeat. Its control may also show up without one (`present`): then the reports do not get
through, and the worker is only a last choice, since a control ends a rank that is silent.

An accusation (a connection refused, a question unanswered) takes a worker out of routing at once, until it is heard
again; more of them before that are the same incident, for which many requests may suffer. `max_accusations` incidents
without `stable_s` of peace between them fence it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.messages import WorkerRef


class Health(StrEnum):
    STARTING = "starting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    FENCED = "fenced"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing of this incarnation counts any more."""

    worker: str
    incarnation: str
    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process, however it is. `incarnation` is empty for one that never joined."""

    worker: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Restart:
    worker: str
    attempt: int
    """Starts in a row without success, this one included."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It failed to start too often, or would for ever; people must look."""

    worker: str
    why: str


Decision = Fence | Kill | Restart | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthBounds:
    """Seconds, except for counts."""

    suspect_s: float = 2.0
    fence_s: float = 6.0
    start_s: float = 180.0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    stable_s: float = 30.0
    max_start_failures: int = 3
    max_accusations: int = 3


@dataclass(slots=True)
class Member:
    """One worker's state. `since_s`: when it entered `health`; `story`: its last transitions, for errors and people."""

    name: str
    health: Health
    since_s: float
    incarnation: str = ""
    heard_s: float = 0.0
    present_s: float = 0.0
    joined_s: float = 0.0
    restart_at_s: float = 0.0
    failures: int = 0
    """Lives in a row that ended before `stable_s`."""
    failed_starts: int = 0
    """In a row."""
    accusations: int = 0
    accused_s: float = float("-inf")
    why: str = ""
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    story: deque[str] = field(default_factory=lambda: deque(maxlen=16))


class Membership:
    """Every worker's health. Times are the caller's clock, never read here."""

    def __init__(self, bounds: HealthBounds) -> None:
        self._bounds = bounds
        self._members: dict[str, Member] = {}
        self._decisions: list[Decision] = []

    # -- what happened -------------------------------------------------------------------------------------------

    def expect(self, name: str, now: float) -> None:
        """This worker is being started and should join soon."""
        if name not in self._members:
            self._members[name] = self._enter(Member(name, Health.STARTING, now), Health.STARTING, now, "expected")

    def joined(self, ref: WorkerRef, now: float) -> bool:
        """A worker registered. False: this incarnation was fenced before and stays out."""
        member = self._members.setdefault(ref.name, Member(ref.name, Health.STARTING, now))
        if ref.incarnation in member.dead:
            return False
        if ref.incarnation != member.incarnation:
            if member.incarnation and member.incarnation not in member.dead:
                self._fence(member, "replaced by a new incarnation")
            member.incarnation, member.joined_s, member.accusations, member.failed_starts = ref.incarnation, now, 0, 0
        member.heard_s = member.present_s = now
        self._enter(member, Health.ALIVE, now, f"joined as {ref.incarnation}")
        return True

    def heard(self, name: str, incarnation: str, now: float) -> bool:
        """A sign of life. False: from nobody we know, or from an incarnation that is no more."""
        member = self._members.get(name)
        if member is None or not self._is_current(member, incarnation):
            return False
        member.heard_s = now
        if member.health is Health.SUSPECT:
            self._enter(member, Health.ALIVE, now, "heard again")
        if now - member.joined_s >= self._bounds.stable_s:
            member.failures = 0
        return True

    def present(self, name: str, incarnation: str, now: float) -> bool:
        """Its control is there, whatever became of its reports. False: this incarnation is nobody (any more)."""
        member = self._members.get(name)
        if member is None or not self._is_current(member, incarnation):
            return False
        member.present_s = now
        return True

    def accused(self, name: str, incarnation: str, why: str, now: float) -> None:
        """Somebody could not get an answer from it."""
        member = self._members.get(name)
        if member is None or not self._is_current(member, incarnation):
            return
        if member.health is Health.SUSPECT and member.accused_s >= member.heard_s:
            return
        quiet = now - member.accused_s >= self._bounds.stable_s
        member.accusations = 1 if quiet else member.accusations + 1
        member.accused_s = now
        if member.accusations >= self._bounds.max_accusations:
            self._bury(member, now, f"accused {member.accusations} times, last: {why}")
        else:
            self._enter(member, Health.SUSPECT, now, f"accused: {why}")

    def exited(self, name: str, incarnation: str, why: str, now: float, *, hopeless: bool = False) -> None:
        """Its process is gone (`incarnation` empty: before it joined). Late news of a fenced one changes nothing.
        `hopeless`: started anew it would fail again; believed of a worker that has never joined."""
        member = self._members.get(name)
        if member is None:
            return
        never_joined = member.health is Health.STARTING and incarnation not in member.dead
        if never_joined or self._is_current(member, incarnation):
            self._bury(member, now, why, hopeless=hopeless and not member.incarnation)

    def forget(self, name: str) -> None:
        """The worker was taken out on purpose."""
        self._members.pop(name, None)

    # -- what follows --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[Decision, ...]:
        """What is to be done now. Each decision is handed out once."""
        for member in self._members.values():
            _RULES[member.health](self, member, now)
        decisions, self._decisions = tuple(self._decisions), []
        return decisions

    def usable(self, name: str) -> bool:
        """May be routed to, and nobody complains."""
        member = self._members.get(name)
        return member is not None and member.health is Health.ALIVE

    def late(self, name: str) -> bool:
        """Only silent, not accused: better than nobody."""
        member = self._members.get(name)
        return member is not None and member.health is Health.SUSPECT and member.accused_s < member.heard_s

    def health(self, name: str) -> Health | None:
        member = self._members.get(name)
        return member.health if member else None

    def why(self, name: str) -> str:
        member = self._members.get(name)
        return member.why if member else "unknown worker"

    def members(self) -> Iterable[Member]:
        return self._members.values()

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_current(self, member: Member, incarnation: str) -> bool:
        alive = member.health in (Health.ALIVE, Health.SUSPECT)
        return alive and incarnation == member.incarnation and incarnation not in member.dead

    def _watch_silence(self, member: Member, now: float) -> None:
        silent_s = now - member.heard_s
        if min(silent_s, now - member.present_s) >= self._bounds.fence_s:
            self._bury(member, now, f"silent for {silent_s:.1f} s")
        elif silent_s >= self._bounds.suspect_s and member.health is Health.ALIVE:
            self._enter(member, Health.SUSPECT, now, f"silent for {silent_s:.1f} s")

    def _watch_start(self, member: Member, now: float) -> None:
        if now - member.since_s >= self._bounds.start_s:
            self._bury(member, now, f"did not join within {self._bounds.start_s:g} s")

    def _watch_backoff(self, member: Member, now: float) -> None:
        if now >= member.restart_at_s:
            self._enter(member, Health.STARTING, now, f"start {member.failures + 1}")
            self._decisions.append(Restart(member.name, member.failures + 1))

    def _rest(self, member: Member, now: float) -> None:
        """Failed for good: only people, or a worker that joins by itself, change that."""

    def _bury(self, member: Member, now: float, why: str, *, hopeless: bool = False) -> None:
        """Fence, kill, and start again later, or not at all."""
        started = member.health is not Health.STARTING
        if started and now - member.joined_s >= self._bounds.stable_s:
            member.failures = 0
        else:
            member.failures += 1
        member.failed_starts += not started
        self._fence(member, why)
        self._decisions.append(Kill(member.name, member.incarnation if started else ""))
        if hopeless or member.failed_starts >= self._bounds.max_start_failures:
            self._enter(member, Health.FAILED, now, why)
            often = f"{member.failed_starts} failed starts in a row, last: " if not hopeless else ""
            self._decisions.append(GiveUp(member.name, often + why))
            return
        backoff_s = min(self._bounds.backoff_s * 2.0 ** max(0, member.failures - 1), self._bounds.backoff_max_s)
        member.restart_at_s = now + backoff_s
        self._enter(member, Health.FENCED, now, why)

    def _fence(self, member: Member, why: str) -> None:
        if member.incarnation and member.incarnation not in member.dead:
            member.dead.append(member.incarnation)
            self._decisions.append(Fence(member.name, member.incarnation, why))

    def _enter(self, member: Member, health: Health, now: float, why: str) -> Member:
        if health is not member.health:
            member.since_s = now
        member.health, member.why = health, why
        member.story.append(f"{now:.3f} {health}: {why}")
        return member


_RULES = {
    Health.STARTING: Membership._watch_start,
    Health.ALIVE: Membership._watch_silence,
    Health.SUSPECT: Membership._watch_silence,
    Health.FENCED: Membership._watch_backoff,
    Health.FAILED: Membership._rest,
}
