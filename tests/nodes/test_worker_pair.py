"""Two workers in one thread: right text or an error, never wrong text, and every block comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.worker import link_rates
from engine.types import FinishReason
from kvtransfer.faults import Fault
from kvtransfer.rates import PeerRate
from prefill_node.handoff import Stage as Source
from prefill_node.service import PrefillLimits
from tandem.messages import (
    Abort,
    AskLease,
    Code,
    Commit,
    DropLease,
    Expect,
    HandedOver,
    InjectFault,
    LinkRate,
    RenewLease,
    ResetPrefixCache,
    SetDraining,
    Submit,
)
from tests.nodes.ledger_model import EOS, ledger_engine
from tests.nodes.pair import Net, declined, finished_early, handed_over, prompt, request, single


@pytest.fixture
def net():
    net = Net()
    net.add("p0", "prefill")
    net.add("d0", "decode")
    yield net
    net.frozen.clear()
    for worker in net.workers.values():
        worker.engine.check()
        worker.transfers.check()


def asked(net: Net, kind: type) -> list[object]:
    return [question for _, question in net.asked if isinstance(question, kind)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 100, 300])
@pytest.mark.parametrize("budget", [16, 64, 4096])
def test_one_prompt_through_two_workers_reads_as_from_one(length: int, budget: int) -> None:
    net = Net()
    net.add("p0", "prefill", ledger_engine(max_num_batched_tokens=budget))
    net.add("d0", "decode")
    req = request("r", prompt(length))
    submit = net.start(req, "p0", "d0")
    net.run()
    assert net.told["r"].tokens == single(req)
    assert net.told["r"].finish is FinishReason.LENGTH
    report = handed_over(net.answers[submit]).report
    assert report.kv_blocks == -(-length // 16)
    assert report.kv_bytes == report.kv_blocks * 128
    assert report.transport == "inproc"
    assert report.computed_tokens == length
    net.check()


def test_transfers_give_way_exactly_while_their_worker_has_steps_to_do(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, list[bool]] = {name: [] for name in net.workers}
    for name, worker in net.workers.items():
        monkeypatch.setattr(worker.transfers, "give_way", told[name].append)
    net.turn()
    net.start(request("r", prompt(40)), "p0", "d0")
    net.run()
    for name in ("p0", "d0"):
        changes = [now for now, before in zip(told[name][1:], told[name], strict=False) if now != before]
        assert (told[name][0], changes) == (False, [True, False]), name


def test_a_prefix_that_decode_holds_is_not_sent_again(net: Net) -> None:
    first, second = request("a", prompt(64)), request("b", prompt(64) + prompt(20, salt=5))
    net.start(first, "p0", "d0")
    net.run()
    submit = net.start(second, "p0", "d0")
    net.run()
    report = handed_over(net.answers[submit]).report
    assert net.told["b"].tokens == single(second)
    assert (report.decode_held_tokens, report.kv_blocks, report.prefill_cached_tokens) == (64, 2, 64)
    assert max(delta.cached_tokens for delta in net.told["b"].deltas) == 64
    net.check()


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_that_decode_holds_whole_moves_nothing(net: Net, length: int) -> None:
    for name in ("a", "b", "c"):
        req = request(name, prompt(length))
        submit = net.start(req, "p0", "d0")
        net.run()
        assert net.told[name].tokens == single(req)
    report = handed_over(net.answers[submit]).report
    assert (report.kv_blocks, report.decode_held_tokens, report.transport) == (0, length, "")
    assert report.prefill_cached_tokens <= length - 1
    net.check()


def test_many_at_once_read_as_each_alone(net: Net) -> None:
    reqs = [request(f"r{i}", prompt(20 + 13 * i, salt=i % 3), max_tokens=5 + i) for i in range(6)]
    for req in reqs:
        net.start(req, "p0", "d0")
    net.run()
    for req in reqs:
        assert net.told[req.request_id].tokens == single(req)
    net.check()


def test_chunks_are_pushed_while_later_ones_are_computed_and_leases_renewed(net: Net) -> None:
    net.start(request("r", prompt(300)), "p0", "d0")
    flight = net.workers["p0"].prefill._unanswered["r"]
    net.until(lambda: flight.handoff.sent_pieces >= 4)
    assert flight.handoff.computed_tokens < 300
    assert len(asked(net, RenewLease)) >= 2
    net.run()
    assert net.told["r"].tokens == single(request("r", prompt(300)))


def test_the_lease_is_asked_for_before_the_first_chunk_is_computed(net: Net) -> None:
    net.start(request("r", prompt(300)), "p0", "d0")
    net.workers["p0"].prepare(net.now)
    assert [type(value.question) for _, value in net.workers["p0"].outbox] == [AskLease]
    assert net.workers["p0"].engine.load(net.now).prompt_tokens == 0
    net.run()


def test_prompts_far_back_in_the_queue_hold_no_lease() -> None:
    net = Net()
    net.add("p0", "prefill", prefill=PrefillLimits(tokens_per_step=64))
    net.add("d0", "decode")
    reqs = [request(f"r{i}", prompt(60, salt=i)) for i in range(6)]
    for req in reqs:
        net.ask("d0", Expect(req, "g", net.workers["p0"].info.ref))
        net.ask("p0", Submit(req, net.workers["d0"].info.ref))
    net.workers["p0"].prepare(net.now)
    assert [value.question.request_id for _, value in net.workers["p0"].outbox] == ["r0", "r1"]
    net.run()
    assert [net.told[req.request_id].tokens for req in reqs] == [single(req) for req in reqs]
    net.check()


# -- ends with the first token -------------------------------------------------------------------------------------


def test_max_tokens_one_never_asks_decode(net: Net) -> None:
    req = request("r", prompt(40), max_tokens=1)
    submit = net.start(req, "p0", "d0")
    net.until(lambda: submit in net.answers)
    answer = finished_early(net.answers[submit])
    (told,) = answer.deltas
    assert [token.token_id for token in told.tokens] == single(req)
    assert told.finish is FinishReason.LENGTH
    assert not asked(net, AskLease)
    net.abort("r")
    net.run()
    net.check()


@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_a_first_token_that_stops_never_starts_decode(net: Net, how: str) -> None:
    req = request("r", prompt(40), max_tokens=20)
    first = single(req)[0]
    extra = {"eos": {"logit_bias": ((EOS, 100.0),)}, "stop id": {"stop_token_ids": (first,)}}[how]
    req = request("r", prompt(40), max_tokens=20, **extra)
    submit = net.start(req, "p0", "d0")
    net.run()
    answer = finished_early(net.answers[submit])
    (told,) = answer.deltas
    assert told.finish is FinishReason.STOP
    assert [token.token_id for token in told.tokens] == [EOS if how == "eos" else first]
    assert not asked(net, Commit)
    assert net.workers["d0"].engine.load(net.now).generated_tokens == 0
    assert net.told["r"].tokens == []
    net.check()


def test_log_probabilities_of_the_first_token_travel_with_commit(net: Net) -> None:
    req = request("r", prompt(20), max_tokens=3, logprobs=2, prompt_logprobs=1)
    submit = net.start(req, "p0", "d0")
    net.run()
    tokens = [token for delta in net.told["r"].deltas for token in delta.tokens]
    assert all(token.logprob is not None and len(token.top) == 2 for token in tokens)
    assert len(handed_over(net.answers[submit]).prompt_logprobs) == 20


# -- local prefill -------------------------------------------------------------------------------------------------


def test_decode_can_prefill_by_itself(net: Net) -> None:
    req = request("r", prompt(100))
    net.start(req, None, "d0")
    net.run()
    assert net.told["r"].tokens == single(req)
    assert net.told["r"].finish is FinishReason.LENGTH
    net.check()


def test_a_local_prefill_can_be_aborted(net: Net) -> None:
    net.start(request("r", prompt(300), max_tokens=50), None, "d0")
    net.turn()
    net.abort("r")
    net.run()
    assert net.told["r"].finish is FinishReason.ABORT
    net.check()


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3, 5])
@pytest.mark.parametrize("kind", [Fault.FAIL, Fault.CORRUPT])
def test_a_failed_transfer_is_an_error_and_never_other_text(net: Net, kind: Fault, nth: int) -> None:
    where = "d0" if kind is Fault.CORRUPT else "p0"
    net.ask(where, InjectFault(kind.value, nth))
    req = request("r", prompt(300))
    submit = net.start(req, "p0", "d0")
    net.run()
    answer = declined(net.answers[submit])
    assert answer.code is Code.UNAVAILABLE
    assert net.told["r"].tokens == []
    net.check()
    submit = net.start(replace(req, request_id="r~1"), "p0", "d0")
    net.run()
    assert net.told["r~1"].tokens == single(req)
    net.check()


def test_a_dropped_transfer_ends_with_the_lease_and_fences_the_peer(net: Net) -> None:
    net.ask("p0", InjectFault("drop", 2))
    submit = net.start(request("r", prompt(100), deadline_s=103.0), "p0", "d0")
    net.run(turns=400, dt=0.05)
    assert declined(net.answers[submit]).code is Code.DEADLINE
    assert net.told["r"].tokens == []
    net.check()


def test_a_dropped_transfer_is_given_up_after_a_patience_long_before_the_deadline(net: Net) -> None:
    net.ask("p0", InjectFault("drop", 2))
    started = net.now
    submit = net.start(request("r", prompt(100), deadline_s=1e9), "p0", "d0")  # on the engines' own clock too
    net.until(lambda: submit in net.answers, turns=8_000)
    patience_s = net.workers["p0"].settings.prefill.push_patience_s
    assert net.now - started < patience_s + 0.5
    answer = declined(net.answers[submit])
    assert answer.code is Code.UNAVAILABLE
    assert "deadline passed" in answer.message
    net.abort("r")
    net.run(turns=400, dt=0.05)
    assert net.told["r"].tokens == []
    net.check()


def test_a_delayed_transfer_is_only_late(net: Net) -> None:
    net.ask("p0", InjectFault("delay", 2, 0.5))
    req = request("r", prompt(100))
    net.start(req, "p0", "d0")
    net.run(turns=400, dt=0.01)
    assert net.told["r"].tokens == single(req)
    net.check()


def test_faults_must_be_allowed(net: Net) -> None:
    net.add("p1", "prefill", allow_faults=False)
    ask_id = net.ask("p1", InjectFault("fail"))
    net.turn()
    assert declined(net.answers[ask_id]).code is Code.INVALID


def test_a_lost_commit_answer_is_asked_again_and_changes_nothing(net: Net) -> None:
    net.lost_answers = [Commit, Commit]
    req = request("r", prompt(40), max_tokens=30)
    submit = net.start(req, "p0", "d0")
    net.run(dt=0.01)
    assert len(asked(net, Commit)) == 3
    assert net.told["r"].tokens == single(req)
    handed_over(net.answers[submit])
    net.check()


def test_a_lost_lease_answer_sends_the_request_back_and_the_lease_runs_out(net: Net) -> None:
    net.lost_answers = [AskLease]
    submit = net.start(request("r", prompt(40)), "p0", "d0")
    net.run(turns=400, dt=0.05)
    assert declined(net.answers[submit]).code is Code.UNAVAILABLE
    assert net.told["r"].error is not None
    net.check()


# -- abort, deadline, lost peers -----------------------------------------------------------------------------------


def source_is(net: Net, stage: Source):
    def reached() -> bool:
        flight = net.workers["p0"].prefill._unanswered.get("r")
        return flight is not None and flight.handoff.stage is stage

    return reached


@pytest.mark.parametrize("stage", [Source.QUEUED, Source.ASKING, Source.PUSHING, Source.COMMITTING, None])
@pytest.mark.parametrize("how", ["abort", "kill decode", "kill prefill", "deadline"])
def test_whatever_ends_a_request_wherever_it_is_no_block_stays(stage: Source | None, how: str) -> None:
    net = Net()
    net.add("p0", "prefill")
    net.add("d0", "decode")
    net.start(request("r", prompt(200), max_tokens=400, deadline_s=103.0), "p0", "d0")
    if stage in (Source.ASKING, Source.COMMITTING):
        net.frozen.add("d0")
    if stage is Source.COMMITTING:
        net.frozen.clear()
        net.until(source_is(net, Source.PUSHING))
        net.frozen.add("d0")
    if stage is None:
        net.until(lambda: len(net.told["r"].tokens) > 3)
    else:
        net.until(source_is(net, stage))
    if how == "abort":
        net.frozen.clear()
        net.abort("r")
    elif how == "deadline":
        net.frozen.clear()
        net.now = 104.0
    else:
        net.frozen.clear()
        net.kill("d0" if how == "kill decode" else "p0")
    net.run(turns=400, dt=0.05)
    net.check()


def test_a_request_that_runs_on_decode_survives_the_loss_of_prefill(net: Net) -> None:
    req = request("r", prompt(40), max_tokens=40)
    submit = net.start(req, "p0", "d0")
    net.until(lambda: submit in net.answers)
    net.kill("p0")
    net.run()
    assert net.told["r"].tokens == single(req)
    net.check()


def test_a_lost_prefill_worker_is_told_to_the_gateway(net: Net) -> None:
    net.start(request("r", prompt(300)), "p0", "d0")
    net.until(source_is(net, Source.PUSHING))
    net.kill("p0")
    net.run()
    assert net.told["r"].error is not None
    assert net.told["r"].error.by == "p0"
    net.check()


def test_a_frozen_prefill_worker_costs_a_lease_and_no_more(net: Net) -> None:
    net.start(request("r", prompt(300)), "p0", "d0")
    net.until(source_is(net, Source.PUSHING))
    net.frozen.add("p0")
    started = net.now
    net.run(turns=400, dt=0.05)
    assert net.now - started < 10
    assert net.workers["d0"].engine.load(net.now).live_blocks == 0
    net.frozen.clear()
    net.run(turns=400, dt=0.05)  # revived, it finds its lease gone
    net.check()


def test_a_restarted_decode_refuses_what_was_meant_for_the_old_one(net: Net) -> None:
    submit = net.start(request("r", prompt(300)), "p0", "d0")
    net.until(source_is(net, Source.PUSHING))
    net.kill("d0")
    net.add("d0", "decode")
    net.run()
    assert declined(net.answers[submit]).code is Code.UNAVAILABLE
    req = request("again", prompt(50))
    net.start(req, "p0", "d0")
    net.run()
    assert net.told["again"].tokens == single(req)
    net.check()


def test_stale_leases_and_unknown_ones_are_refused(net: Net) -> None:
    net.start(request("r", prompt(300), max_tokens=50), "p0", "d0")
    net.until(source_is(net, Source.PUSHING))
    grant = net.workers["p0"].prefill._unanswered["r"].handoff.grant
    assert grant is not None
    old = net.ask("d0", RenewLease(grant.lease_id, grant.generation + 1))
    unknown = net.ask("d0", RenewLease("nobody", 1))
    harmless = net.ask("d0", DropLease(grant.lease_id, grant.generation + 1, "wrong generation"))
    net.turn()
    assert "at prefill but" in declined(net.answers[old]).message
    assert declined(net.answers[unknown]).code is Code.STALE
    assert harmless in net.answers
    net.run()
    assert net.told["r"].tokens == single(request("r", prompt(300), max_tokens=50))
    net.check()


def test_a_reservation_that_is_never_used_ends_by_its_deadline(net: Net) -> None:
    net.add("p1", "prefill")
    net.frozen.add("p1")
    net.start(request("r", prompt(40), deadline_s=101.0), "p1", "d0")
    net.frozen.discard("p1")
    del net.workers["p1"]
    net.run(turns=100, dt=0.05)
    assert net.told["r"].finish is FinishReason.DEADLINE
    net.check()


# -- room ----------------------------------------------------------------------------------------------------------


def test_a_decode_pool_for_two_serves_eight_without_deadlock_or_starvation() -> None:
    net = Net()
    net.add("p0", "prefill", ledger_engine(num_blocks=24))
    net.add("d0", "decode", ledger_engine(num_blocks=12))
    reqs = [request(f"r{i}", prompt(60, salt=i), max_tokens=12, arrival_s=100.0 + i) for i in range(8)]
    waiting = {req.request_id: (req, 0) for req in reqs}
    pending: dict[str, int] = {}
    finished: list[str] = []
    denied = 0
    for _ in range(4000):
        for name, (req, attempt) in tuple(waiting.items()):
            if name not in pending:
                tried = replace(req, request_id=f"{name}~{attempt}" if attempt else name)
                ask_id = net.start(tried, "p0", "d0")
                assert ask_id is not None
                pending[name] = ask_id
        net.turn(0.01)
        for name, ask_id in tuple(pending.items()):
            answer = net.answers.get(ask_id)
            if answer is None:
                continue
            del pending[name]
            req, attempt = waiting[name]
            if hasattr(answer, "code"):
                assert answer.code is Code.NO_ROOM, answer
                denied += 1
                net.abort(f"{name}~{attempt}" if attempt else name, again=True)
                waiting[name] = (req, attempt + 1)
            else:
                finished.append(name)
                del waiting[name]
                told = net.told[f"{name}~{attempt}" if attempt else name]
                net.until(lambda told=told: told.finish is not None)
                assert told.tokens == single(req)
        if not waiting:
            break
    assert sorted(finished) == sorted(req.request_id for req in reqs)
    assert denied > 0
    net.run()
    net.check()


def denied(net: Net, deadline_s: float | None = None) -> None:
    """A decode pool in use, and a request that was denied almost all of it."""
    net.add("p0", "prefill")
    net.add("d0", "decode", ledger_engine(num_blocks=64))
    net.start(request("running", prompt(90, salt=1), max_tokens=900, arrival_s=99.0), "p0", "d0")
    net.until(lambda: len(net.told["running"].tokens) > 1)
    ask_id = net.start(request("big", prompt(900, salt=2), deadline_s=deadline_s), "p0", "d0")
    net.until(lambda: ask_id in net.answers)
    assert ask_id is not None
    assert declined(net.answers[ask_id]).code is Code.NO_ROOM
    net.abort("big", again=True)
    net.turn()


def small_waits_s(net: Net) -> float:
    """How long a younger request waits that would fit beside the running one."""
    start_s = net.now
    for attempt in range(1000):
        ask_id = net.start(request(f"small~{attempt}", prompt(20, salt=3), max_tokens=2, arrival_s=101.0), "p0", "d0")
        net.until(lambda asked=ask_id: asked in net.answers)
        assert ask_id is not None
        if isinstance(net.answers[ask_id], HandedOver):
            break
        net.abort(f"small~{attempt}", again=True)
        net.turn(0.05)
    waited_s = net.now - start_s
    net.abort("running")
    net.run()
    net.check()
    return waited_s


def test_who_is_over_holds_nobody_back_and_who_comes_again_or_says_nothing_does_for_its_claim() -> None:
    net = Net()
    denied(net)
    assert small_waits_s(net) == pytest.approx(3.0, abs=0.1)
    net = Net()
    denied(net)
    net.ask("d0", Abort("big"))
    assert small_waits_s(net) < 0.05


def test_a_claim_ends_with_its_requests_deadline() -> None:
    net = Net()
    denied(net, deadline_s=101.0)
    assert small_waits_s(net) == pytest.approx(1.0, abs=0.1)


def test_small_requests_cannot_starve_a_big_one() -> None:
    net = Net()
    net.add("p0", "prefill")
    net.add("d0", "decode", ledger_engine(num_blocks=12))
    big = request("big", prompt(150, salt=9), max_tokens=4, arrival_s=100.0)
    attempt = 0
    net.start(request("s0", prompt(40, salt=1), max_tokens=40, arrival_s=99.0), "p0", "d0")
    net.until(lambda: len(net.told["s0"].tokens) > 1)
    ask_id = net.start(big, "p0", "d0")
    for smalls in range(1, 400):
        net.start(request(f"s{smalls}", prompt(40, salt=smalls), max_tokens=20, arrival_s=net.now), "p0", "d0")
        for _ in range(3):
            net.turn(0.01)
        answer = net.answers.get(ask_id)
        if answer is not None and hasattr(answer, "code"):
            assert answer.code is Code.NO_ROOM
            net.abort(f"big~{attempt}" if attempt else "big", again=True)
            attempt += 1
            ask_id = net.start(replace(big, request_id=f"big~{attempt}"), "p0", "d0")
        elif answer is not None:
            break
    handed_over(net.answers[ask_id])
    assert attempt > 0
    for name in tuple(net.workers["d0"].request_ids()):
        net.abort(name)
    net.run()
    net.check()


def test_a_preempted_prefill_sends_each_block_once_and_reads_right() -> None:
    net = Net()
    net.add("p0", "prefill", ledger_engine(num_blocks=14, max_num_batched_tokens=32))
    net.add("d0", "decode")
    reqs = [request(f"r{i}", prompt(100, salt=i)) for i in range(4)]
    for req in reqs:
        net.start(req, "p0", "d0")
    net.run()
    for req in reqs:
        assert net.told[req.request_id].tokens == single(req)
    net.check()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_run_is_refused_at_once_by_name(net: Net) -> None:
    bad = request("r", prompt(40), max_tokens=5000)
    assert net.start(bad, "p0", "d0") is None
    assert net.told["r"].error.code is Code.INVALID
    assert "max_tokens" in net.told["r"].error.message
    ask_id = net.ask("p0", Submit(request("q", ()), net.workers["d0"].info.ref))
    net.turn()
    assert declined(net.answers[ask_id]).code is Code.INVALID
    net.run()
    net.check()


def test_a_layout_mismatch_is_refused_with_both_values(net: Net) -> None:
    info = net.workers["p0"].info
    net.start(request("r", prompt(300)), "p0", "d0")
    ask = AskLease("r", info.ref, info.transports, info.model_digest, "layers=2", 16)
    ask_id = net.ask("d0", ask)
    other = net.ask("d0", replace(ask, layout=info.layout, model_digest="d2"))
    net.turn()
    assert "layout is layers=2 at p0 but ledger at d0" in declined(net.answers[ask_id]).message
    assert "model digest is d2 at p0 but d1 at d0" in declined(net.answers[other]).message
    net.run()


def test_of_two_incarnations_of_a_peer_the_later_one_s_rate_is_told() -> None:
    rates = (
        PeerRate("d#1", "shm", 1.0, 9.0, 5),
        PeerRate("e#1", "shm", 2.0, 2.0, 1),
        PeerRate("d#2", "shm", 3.0, 3.0, 1),
    )
    told = link_rates(rates, 10.0)
    assert told == (LinkRate("d", "shm", 3.0, 3.0, 10.0), LinkRate("e", "shm", 2.0, 2.0, 10.0))


def test_a_prompt_that_another_computes_comes_without_generated_tokens(net: Net) -> None:
    asked = net.ask("d0", Expect(request("r", prompt(5)), "g", net.workers["p0"].info.ref, generated=(1, 2)))
    net.turn()
    answer = declined(net.answers[asked])
    assert (answer.code, answer.message) == (Code.INVALID, "generated: goes with no prefill worker")


def test_a_role_takes_only_its_own_work_and_a_draining_worker_none(net: Net) -> None:
    ref = net.workers["d0"].info.ref
    wrong = net.ask("d0", Submit(request("r", prompt(5)), ref))
    net.ask("p0", SetDraining(True))
    drained = net.ask("p0", Submit(request("r", prompt(5)), ref))
    net.turn()
    assert "not a prefill worker" in declined(net.answers[wrong]).message
    assert "draining" in declined(net.answers[drained]).message


def test_who_found_no_landing_place_goes_before_younger_requests() -> None:
    """As where the pool is in a device's memory, and KV arrives by way of a smaller region."""
    net = Net()
    net.add("p0", "prefill")
    transfers, block_bytes = net.add("d0", "decode").transfers, 128
    free_blocks = 9
    transfers.has_room = lambda num_bytes: num_bytes <= free_blocks * block_bytes  # type: ignore[method-assign]
    big = request("big", prompt(160), arrival_s=1.0)
    young = [request(f"young{number}", prompt(32, salt=number + 1), arrival_s=2.0) for number in range(2)]
    for one in (big, young[0]):
        ask_id = net.start(one, "p0", "d0")
        net.until(lambda asked=ask_id: asked in net.answers)
        assert ask_id is not None
        assert declined(net.answers[ask_id]).message == "the staging memory of d0 is full"
        net.abort(one.request_id, again=True)
    free_blocks = 10
    again = [net.start(replace(one, request_id=f"{one.request_id}~1"), "p0", "d0") for one in (big, young[0])]
    net.start(young[1], "p0", "d0")
    net.run()
    for ask_id in again:
        assert ask_id is not None
        handed_over(net.answers[ask_id])
    assert net.told["young1"].finish is FinishReason.LENGTH
    net.check()


def test_full_queues_decline_with_no_room() -> None:
    net = Net()
    net.add("p0", "prefill", prefill=PrefillLimits(max_queued=1))
    net.add("d0", "decode")
    net.start(request("a", prompt(100)), "p0", "d0")
    second = net.start(request("b", prompt(100)), "p0", "d0")
    net.turn()
    assert declined(net.answers[second]).code is Code.NO_ROOM
    net.abort("b")
    net.run()
    net.check()


# -- news ----------------------------------------------------------------------------------------------------------


def test_load_reports_come_on_change_at_a_bounded_rate_and_as_a_heartbeat(net: Net) -> None:
    for _ in range(100):
        net.turn(0.02)
    idle = [report for report in net.reports if report.worker == "d0"]
    assert 3 <= len(idle) <= 6
    net.start(request("r", prompt(100), max_tokens=100), "p0", "d0")
    net.run(dt=0.001)
    busy = [report for report in net.reports if report.worker == "d0"][len(idle) :]
    assert any(report.request_ids == ("r",) for report in busy)
    numbers = [report.number for report in net.reports if report.worker == "d0"]
    assert numbers == list(range(1, len(numbers) + 1))


def test_kv_events_are_numbered_without_holes_and_say_when_all_is_forgotten(net: Net) -> None:
    net.start(request("r", prompt(100)), "p0", "d0")
    net.run()
    ask_id = net.ask("d0", ResetPrefixCache())
    net.turn()
    assert net.answers[ask_id].blocks > 0
    events = [event for event in net.kv_events if event.worker == "d0"]
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert sum(len(event.stored) for event in events) >= 6
    assert events[-1].cleared
