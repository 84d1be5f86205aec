"""The engine as a whole, on a model whose output is a hash of what it read back through the block tables."""

from __future__ import annotations

import random

import pytest
from fakes import (
    EOS,
    OTHER_EOS,
    VOCAB,
    Clock,
    Story,
    expected,
    make_engine,
    make_request,
    prompt_of,
    run_all,
    runner_of,
)

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.types import FinishReason, Request, Token


def story_of(engine: Engine, request: Request) -> Story:
    return run_all(engine, request)


def idle(engine: Engine) -> bool:
    load = engine.load(0.0)
    return load.live_blocks == load.running == load.waiting == load.leased_blocks == 0


# -- output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 64, 4096])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("block_size", [16, 32])
def test_output_is_the_models_whatever_the_chunks(budget: int, chunked: bool, block_size: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget, chunked_prefill=chunked, block_size=block_size)
    requests = [make_request(prompt_of(length, length), max_tokens=20) for length in (1, 15, 16, 17, 48, 100)]
    story = run_all(engine, *requests)
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 20)
        assert story.last(request.request_id).finish == "length"
    assert idle(engine)


def test_a_seed_gives_the_same_tokens_alone_in_company_after_preemption_and_on_another_worker() -> None:
    def mine(request_id: str) -> Request:
        return make_request(prompt_of(40), request_id, seed=42, temperature=0.8, max_tokens=60, ignore_eos=True)

    alone = story_of(make_engine(), mine("m")).tokens("m")
    neighbours = [make_request(prompt_of(40, i), seed=42 + i, temperature=1.5, max_tokens=60) for i in range(3)]
    tight = make_engine(14, max_num_batched_tokens=20)
    company = run_all(tight, *neighbours, mine("m"))
    assert tight.load(0.0).preemptions > 0
    assert company.tokens("m") == alone
    prefill, decode = make_engine(), make_engine()
    assert handed_over(prefill, decode, mine("m")).tokens("m") == alone[1:]


def test_siblings_differ_and_can_be_repeated() -> None:
    requests = [make_request(prompt_of(20), temperature=1.0, seed=7, sequence_index=i) for i in range(3)]
    first = run_all(make_engine(), *requests)
    again = run_all(make_engine(), *reversed(requests))
    outputs = [tuple(first.tokens(request.request_id)) for request in requests]
    assert len(set(outputs)) == 3
    assert outputs == [tuple(again.tokens(request.request_id)) for request in requests]


def test_min_tokens_hold_eos_and_stop_ids_back_and_ignore_eos_goes_on() -> None:
    for eos in (EOS, OTHER_EOS):
        bias = ((eos, 100.0),)
        ended = make_request(prompt_of(9), logit_bias=bias, min_tokens=10, max_tokens=20, ignore_eos=False)
        deaf = make_request(prompt_of(9), logit_bias=bias, max_tokens=20, ignore_eos=True)
        story = run_all(make_engine(), ended, deaf)
        tokens = story.tokens(ended.request_id)
        assert len(tokens) == 11
        assert tokens[10] == eos
        assert eos not in tokens[:10]
        assert story.last(ended.request_id).finish is FinishReason.STOP
        assert story.tokens(deaf.request_id) == [eos] * 20
        assert story.last(deaf.request_id).finish is FinishReason.LENGTH


def test_a_stop_id_ends_the_request_even_when_eos_is_ignored() -> None:
    wanted = expected(prompt_of(9), 8)
    stop = wanted[3]
    request = make_request(prompt_of(9), stop_token_ids=(stop,), ignore_eos=True)
    story = story_of(make_engine(), request)
    assert story.tokens(request.request_id) == wanted[: wanted.index(stop) + 1]
    assert story.last(request.request_id).finish is FinishReason.STOP


def test_penalties_survive_preemption() -> None:
    def requests() -> list[Request]:
        return [
            make_request(prompt_of(40, i), f"r{i}", repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=80)
            for i in range(3)
        ]

    roomy, tight = make_engine(64), make_engine(11)
    want, got = run_all(roomy, *requests()), run_all(tight, *requests())
    assert tight.load(0.0).preemptions > 0
    assert [want.tokens(f"r{i}") for i in range(3)] == [got.tokens(f"r{i}") for i in range(3)]
    assert want.tokens("r0") != expected(prompt_of(40), 80)


@pytest.mark.parametrize("budget", [7, 16, 4096])
def test_prompt_logprobs_are_complete_whatever_the_cache_the_chunks_and_preemption(budget: int) -> None:
    reference = story_of(make_engine(), make_request(prompt_of(70), "x", prompt_logprobs=2, logprobs=2, max_tokens=2))
    engine = make_engine(max_num_batched_tokens=budget)
    for _ in range(2):
        story = story_of(engine, make_request(prompt_of(70), "x", prompt_logprobs=2, logprobs=2, max_tokens=2))
        told = [one.prompt_logprobs for one in story.progress["x"] if one.prompt_logprobs]
        assert len(told) == 1
        assert len(told[0]) == 70
        assert told[0][0] == Token(prompt_of(70)[0])
        assert [token.token_id for token in told[0]] == list(prompt_of(70))
        assert all(token.logprob is not None and len(token.top) == 2 for token in told[0][1:])
        assert told[0] == next(one.prompt_logprobs for one in reference.progress["x"] if one.prompt_logprobs)
        assert story.full("x") == reference.full("x")
        assert story.last("x").cached_tokens == 0


def test_prompt_logprobs_of_one_token_and_after_a_preempted_prompt() -> None:
    story = story_of(make_engine(), make_request([5], "x", prompt_logprobs=1))
    assert story.progress["x"][0].prompt_logprobs == (Token(5),)
    want = story_of(make_engine(), make_request(prompt_of(60, 1), "x", prompt_logprobs=1))
    tight = make_engine(8, max_num_batched_tokens=2)
    got = run_all(
        tight, make_request(prompt_of(30), max_tokens=90), make_request(prompt_of(60, 1), "x", prompt_logprobs=1)
    )
    assert tight.load(0.0).preemptions > 0
    told = [[one.prompt_logprobs for one in s.progress["x"] if one.prompt_logprobs] for s in (want, got)]
    assert told[0] == told[1]


# -- prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["builtin", "sha256"])
@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
def test_a_repeated_prompt_hits_all_but_its_last_token_and_says_the_same(name: str, length: int) -> None:
    engine = make_engine(prefix_hash=name)
    hits = []
    for _ in range(3):
        story = story_of(engine, make_request(prompt_of(length), "x", logprobs=1))
        assert story.tokens("x") == expected(prompt_of(length), 8)
        hits.append(story.last("x").cached_tokens)
    most = (length - 1) // 16 * 16
    assert hits == [0, most, most]


def test_an_extended_prompt_hits_what_came_before_and_so_does_the_next_turn() -> None:
    engine = make_engine()
    prompt = prompt_of(48)
    first = story_of(engine, make_request(prompt, "a", max_tokens=20))
    longer = story_of(engine, make_request((*prompt, *prompt_of(16, 5)), "b"))
    assert longer.last("b").cached_tokens == 48
    answered = (*prompt, *first.tokens("a"), *prompt_of(10, 6))
    turn = story_of(engine, make_request(answered, "c"))
    assert turn.last("c").cached_tokens == 64
    assert turn.tokens("c") == expected(answered, 8)


def test_no_hit_is_ever_false_while_blocks_are_recycled() -> None:
    engine = make_engine(24)
    chance = random.Random(5)
    texts = [prompt_of(160, seed) for seed in range(4)]
    texts += [(*texts[0][:80], *prompt_of(80, 9)), (*texts[0][:32], *prompt_of(100, 8))]
    for _ in range(60):
        prompt = chance.choice(texts)[: chance.choice([20, 96, 160])]
        story = story_of(engine, make_request(prompt, "x", cache_salt=chance.choice(["", "", "s"])))
        assert story.tokens("x") == expected(prompt, 8)
        assert idle(engine)


def test_churn_leaves_no_hit_behind() -> None:
    engine = make_engine(24)
    story_of(engine, make_request(prompt_of(160), "a"))
    run_all(engine, make_request(prompt_of(160, 1)), make_request(prompt_of(160, 2)), make_request(prompt_of(160, 3)))
    story = story_of(engine, make_request(prompt_of(160), "a"))
    assert story.last("a").cached_tokens == 0
    assert story.tokens("a") == expected(prompt_of(160), 8)


def test_salts_and_a_switched_off_cache_share_nothing() -> None:
    engine = make_engine()
    story_of(engine, make_request(prompt_of(64)))
    story = story_of(engine, make_request(prompt_of(64), "other", cache_salt="tenant"))
    assert story.last("other").cached_tokens == 0
    without = make_engine(prefix_caching=False)
    for _ in range(2):
        story = story_of(without, make_request(prompt_of(64), "x"))
        assert story.last("x").cached_tokens == 0
    assert without.load(0.0).cached_blocks == 0
    assert without.drain_kv_events() == ((), (), False)


def test_events_say_what_the_cache_holds_and_nothing_else() -> None:
    engine = make_engine(8)
    told: set[bytes] = set()
    for seed in (0, 1, 2, 0):
        story_of(engine, make_request(prompt_of(60, seed), max_tokens=10))
        stored, removed, cleared = engine.drain_kv_events()
        assert not cleared
        told = (told | set(stored)) - set(removed)
        assert len(told) == engine.load(0.0).cached_blocks
    assert engine.reset_prefix_cache() == len(told)
    assert engine.drain_kv_events() == ((), (), True)
    assert engine.load(0.0).free_blocks == 8


def test_large_blocks_are_announced_granule_by_granule() -> None:
    engine = make_engine(block_size=32)
    story_of(engine, make_request(prompt_of(70), max_tokens=1))
    assert len(engine.drain_kv_events()[0]) == 4
    assert engine.load(0.0).cached_blocks == 2


def test_hits_are_counted_in_tokens() -> None:
    engine = make_engine()
    for _ in range(2):
        story_of(engine, make_request(prompt_of(50), max_tokens=3))
    load = engine.load(0.0)
    assert (load.prefix_queries, load.prefix_hits) == (100, 48)
    assert (load.prompt_tokens, load.generated_tokens) == (52, 6)


# -- two workers ---------------------------------------------------------------------------------------------------


def handed_over(prefill: Engine, decode: Engine, request: Request) -> Story:
    """Prefill here, copy the blocks, decode there."""
    prefill.submit(request, hold=True)
    first = Story(prefill).run().full(request.request_id)
    lease = decode.lease(request)
    assert lease is not None
    skip = lease.held_tokens // 16
    source = prefill.block_table(request.request_id)
    runner_of(prefill).copy(source[skip : len(lease.block_ids)], runner_of(decode), lease.block_ids[skip:])
    decode.adopt(request, tuple(first))
    prefill.release(request.request_id)
    for engine in (prefill, decode):
        engine.check()
    return Story(decode).run()


@pytest.mark.parametrize("length", [1, 16, 50, 64])
def test_a_handed_over_request_goes_on_where_prefill_stopped(length: int) -> None:
    prefill, decode = make_engine(), make_engine()
    for again in range(2):
        request = make_request(prompt_of(length), f"x{again}", max_tokens=30)
        story = handed_over(prefill, decode, request)
        assert story.tokens(request.request_id) == expected(request.token_ids, 30)[1:]
        assert idle(prefill)
        assert idle(decode)
    assert decode.load(0.0).prefix_hits == length // 16 * 16


def test_an_adopted_request_that_is_preempted_is_computed_again_here() -> None:
    prefill, decode = make_engine(), make_engine(12)
    decode.submit(make_request(prompt_of(40, 3), "older", max_tokens=120))
    Story(decode).step()
    story = handed_over(prefill, decode, make_request(prompt_of(64), "x", max_tokens=60))
    assert decode.load(0.0).preemptions > 0
    assert story.tokens("x") == expected(prompt_of(64), 60)[1:]
    assert story.tokens("older")[-100:] == expected(prompt_of(40, 3), 120)[-100:]


def test_a_held_request_keeps_its_blocks_until_release_and_leaves_them_cached() -> None:
    engine = make_engine()
    engine.submit(make_request(prompt_of(40), "x"), hold=True)
    story = Story(engine).run()
    assert story.tokens("x") == expected(prompt_of(40), 1)
    assert story.last("x").finish is None
    assert len(engine.block_table("x")) == 3
    assert engine.load(0.0).live_blocks == 3
    engine.release("x")
    engine.release("x")
    engine.check()
    load = engine.load(0.0)
    assert (load.live_blocks, load.cached_blocks) == (0, 2)


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"logit_bias": ((EOS, 100.0),), "ignore_eos": False}, FinishReason.STOP),
        ({"logit_bias": ((3, 100.0),), "stop_token_ids": (3,)}, FinishReason.STOP),
    ],
    ids=str,
)
def test_a_first_token_that_ends_the_request_says_so_and_cannot_be_adopted(
    fields: dict[str, object], finish: FinishReason
) -> None:
    prefill, decode = make_engine(), make_engine()
    request = make_request(prompt_of(20), "x", **fields)
    prefill.submit(request, hold=True)
    story = Story(prefill).run()
    assert story.last("x").finish is finish
    prefill.release("x")
    assert idle(prefill)
    assert decode.lease(request) is not None
    with pytest.raises(ValueError, match="nothing left"):
        decode.adopt(request, tuple(story.full("x")))
    assert decode.abort("x")
    assert idle(decode)


def test_adopting_needs_a_lease_of_the_same_prompt_and_a_first_token() -> None:
    engine = make_engine()
    request = make_request(prompt_of(20), "x")
    with pytest.raises(ValueError, match="unknown"):
        engine.adopt(request, (Token(1),))
    engine.lease(request)
    with pytest.raises(ValueError, match="nothing left"):
        engine.adopt(request, ())
    with pytest.raises(ValueError, match="another prompt"):
        engine.adopt(make_request(prompt_of(21), "x"), (Token(1),))
    with pytest.raises(ValueError, match="not held"):
        engine.release("x")
    engine.adopt(request, (Token(1),))
    with pytest.raises(ValueError, match="not leased"):
        engine.adopt(request, (Token(1),))
    engine.check()


def test_a_lease_pins_its_hits_and_is_refused_without_room() -> None:
    engine = make_engine(6)
    story_of(engine, make_request(prompt_of(32), max_tokens=1))
    lease = engine.lease(make_request((*prompt_of(32), *prompt_of(20, 4)), "x"))
    assert lease is not None
    assert lease.held_tokens == 32
    assert engine.load(0.0).leased_blocks == 4
    assert engine.lease(make_request(prompt_of(40, 5), "y")) is None
    assert not engine.abort("y")
    run_all(engine, make_request(prompt_of(20, 6), max_tokens=10))
    assert engine.block_table("x") == lease.block_ids
    engine.check()
    assert engine.abort("x")
    assert engine.lease(make_request(prompt_of(40, 5), "y")) is not None


def test_leases_do_not_starve_who_was_preempted() -> None:
    prefill, decode = make_engine(), make_engine(12)
    for i in range(2):
        decode.submit(make_request(prompt_of(40, i), f"r{i}", max_tokens=100))
    story = Story(decode)
    while not decode.load(0.0).preemptions:
        story.step()
    assert decode.load(0.0).waiting == 1
    assert decode.lease(make_request(prompt_of(8, 7), "late")) is None
    story.run()
    assert story.tokens("r1") == expected(prompt_of(40, 1), 100)
    assert handed_over(prefill, decode, make_request(prompt_of(8, 7), "late")).tokens("late")


def test_more_adopted_requests_than_seats_all_finish() -> None:
    prefill, decode = make_engine(), make_engine(max_num_seqs=2)
    requests = [make_request(prompt_of(20, i), f"r{i}") for i in range(6)]
    for request in requests:
        prefill.submit(request, hold=True)
        first = Story(prefill).run().full(request.request_id)
        lease = decode.lease(request)
        assert lease is not None
        runner_of(prefill).copy(prefill.block_table(request.request_id), runner_of(decode), lease.block_ids)
        decode.adopt(request, tuple(first))
    story = Story(decode).run()
    assert max(len(plan.chunks) for plan in runner_of(decode).plans) == 2
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 8)[1:]


def test_blocks_of_a_transfer_are_not_reused_before_it_lets_go() -> None:
    engine = make_engine(4)
    engine.submit(make_request(prompt_of(40), "x"), hold=True)
    Story(engine).run()
    table = engine.block_table("x")
    engine.retain(table)
    engine.abort("x")
    engine.check()
    assert engine.load(0.0).live_blocks == 3
    engine.submit(make_request(prompt_of(20, 1), "y"))
    assert engine.step(0.0) is None
    assert not engine.has_work(), "nothing to spin for"
    engine.unretain(table)
    assert engine.has_work()
    story = Story(engine).run()
    assert story.tokens("y") == expected(prompt_of(20, 1), 8)
    with pytest.raises(ValueError, match="not all retained"):
        engine.unretain(table[:1])
    assert idle(engine)


# -- ends ----------------------------------------------------------------------------------------------------------


def test_abort_from_every_state_gives_the_blocks_back() -> None:
    engine = make_engine(16, max_num_batched_tokens=16)
    story = Story(engine)
    engine.submit(make_request(prompt_of(20), "held"), hold=True)
    story.run()
    assert engine.lease(make_request(prompt_of(20, 1), "leased")) is not None
    engine.submit(make_request(prompt_of(5, 2), "decoding", max_tokens=90))
    story.step()
    engine.submit(make_request(prompt_of(90, 3), "prompting"))
    story.step()
    engine.submit(make_request(prompt_of(10, 4), "waiting"))
    for name in ("held", "leased", "decoding", "prompting", "waiting"):
        assert engine.abort(name)
        engine.check()
        assert not engine.abort(name)
    assert idle(engine)
    assert not engine.has_work()
    assert engine.step(0.0) is None
    run_all(engine, make_request(prompt_of(200), max_tokens=50))


def test_deadlines_end_the_waiting_and_the_running_and_only_them() -> None:
    clock = Clock()
    engine = make_engine(max_num_seqs=1, clock=clock)
    story = Story(engine)
    engine.submit(make_request(prompt_of(20), "running", max_tokens=500, deadline_s=clock.now + 5))
    story.step()
    engine.submit(make_request(prompt_of(20, 1), "waiting", deadline_s=clock.now + 1))
    engine.submit(make_request(prompt_of(20, 2), "patient"))
    assert engine.next_deadline() == pytest.approx(clock.now + 1, abs=0.01)
    clock.now += 2
    story.step()
    assert story.last("waiting").finish is FinishReason.DEADLINE
    assert story.tokens("waiting") == []
    assert story.last("running").finish is None
    clock.now += 5
    story.run()
    assert story.last("running").finish is FinishReason.DEADLINE
    assert 0 < len(story.tokens("running")) < 500
    assert story.tokens("patient") == expected(prompt_of(20, 2), 8)
    assert engine.next_deadline() is None
    assert engine.load(0.0).prompt_tokens == 40


def test_a_deadline_passes_without_any_model_work() -> None:
    clock = Clock()
    engine = make_engine(4, clock=clock)
    engine.submit(make_request(prompt_of(40), "x"), hold=True)
    story = Story(engine).run()
    engine.submit(make_request(prompt_of(40, 1), "y", deadline_s=clock.now + 1))
    assert not story.step()
    assert not engine.has_work()
    clock.now += 2
    assert engine.has_work()
    assert story.step()
    assert story.last("y").finish is FinishReason.DEADLINE


def test_a_model_that_raises_ends_the_requests_of_that_step_and_the_engine_goes_on() -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(3):
        engine.submit(make_request(prompt_of(20, i), f"r{i}"))
    runner_of(engine).broken = RuntimeError("no memory")
    story = Story(engine).run()
    for name in ("r0", "r1"):
        assert story.last(name).finish is FinishReason.ERROR
        assert "no memory" in story.last(name).error
    assert story.tokens("r2") == expected(prompt_of(20, 2), 8)
    assert idle(engine)


def test_logits_that_are_not_finite_end_their_sequence_alone_and_leave_no_cache() -> None:
    engine = make_engine()
    good, bad = make_request(prompt_of(40), "good"), make_request(prompt_of(40, 1), "bad", temperature=1.0)
    for request in (good, bad):
        engine.submit(request)
    story = Story(engine)
    story.step()
    runner_of(engine).nan_for = "bad"
    story.run()
    assert story.last("bad").finish is FinishReason.ERROR
    assert "not finite" in story.last("bad").error
    assert story.tokens("good") == expected(prompt_of(40), 8)
    again = story_of(engine, make_request(prompt_of(40, 1), "again"))
    assert again.last("again").cached_tokens == 0


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "fits"), [(254, True), (255, True), (256, False), (257, False), (300, False)])
def test_a_request_larger_than_the_pool_is_refused_at_once_and_the_next_one_runs(length: int, fits: bool) -> None:
    engine = make_engine(16, max_model_len=1024)
    big = make_request(prompt_of(length), "big", max_tokens=1)
    if fits:
        assert story_of(engine, big).tokens("big") == expected(big.token_ids, 1)
    else:
        for refuse in (engine.submit, engine.lease):
            with pytest.raises(InvalidRequest, match="256 tokens") as caught:
                refuse(big)
            assert caught.value.field == "token_ids"
    with pytest.raises(InvalidRequest, match="KV pool") as caught:
        engine.submit(make_request(prompt_of(200), max_tokens=200))
    assert caught.value.field == "max_tokens"
    story = story_of(engine, make_request(prompt_of(10), "small"))
    assert story.tokens("small") == expected(prompt_of(10), 8)


def test_a_request_id_is_taken_once_at_a_time() -> None:
    engine = make_engine()
    engine.submit(make_request(prompt_of(10), "x"))
    for refuse in (engine.submit, engine.lease):
        with pytest.raises(InvalidRequest, match="already"):
            refuse(make_request(prompt_of(10), "x"))
    Story(engine).run()
    story_of(engine, make_request(prompt_of(10), "x"))


def test_bad_requests_leave_no_trace() -> None:
    engine = make_engine()
    for bad in (make_request([]), make_request([VOCAB]), make_request([1], temperature=float("nan"))):
        with pytest.raises(InvalidRequest):
            engine.submit(bad)
    assert idle(engine)
    assert not engine.has_work()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_random_traffic_with_aborts_leases_and_transfers_keeps_every_block_accounted_for(preemption: str) -> None:
    chance = random.Random(11)
    clock = Clock()
    engine = make_engine(
        20, clock=clock, max_num_batched_tokens=40, max_num_seqs=5, preemption=preemption, swap_slots=12
    )
    story, known, retained = Story(engine), list[Request](), list[tuple[int, ...]]()
    for number in range(400):
        kind = chance.choice(
            ["submit", "hold", "lease", "adopt", "abort", "retain", "unretain", "step", "step", "reset"]
        )
        request = make_request(
            prompt_of(chance.randint(1, 150), chance.randint(0, 3)),
            f"q{number}",
            max_tokens=chance.randint(1, 60),
            priority=chance.randint(0, 3),
            deadline_s=clock.now + chance.choice([0.00002, 1e9]),
        )
        some = chance.choice(known) if known else request
        if kind in ("submit", "hold", "lease"):
            known.append(request)
            engine.lease(request) if kind == "lease" else engine.submit(request, hold=kind == "hold")
        elif kind == "abort":
            engine.abort(some.request_id)
        elif kind == "adopt":
            adoptable(engine, some)
        elif kind == "retain" and some.request_id in engine._roster.by_id:
            retained.append(engine.block_table(some.request_id))
            engine.retain(retained[-1])
        elif kind == "unretain" and retained:
            engine.unretain(retained.pop(0))
        elif kind == "reset" and chance.random() < 0.2:
            engine.reset_prefix_cache()
        else:
            story.step()
        engine.check()
    for request in known:
        engine.abort(request.request_id)
    for blocks in retained:
        engine.unretain(blocks)
    engine.check()
    assert idle(engine)
    assert story.steps > 50


def adoptable(engine: Engine, request: Request) -> None:
    """Adopt with made-up KV when that is allowed now."""
    lease = engine._roster.by_id.get(request.request_id)
    if lease is None or lease.state != "leased" or request.sampling.max_tokens == 1:
        return
    for block in engine.block_table(request.request_id):
        runner_of(engine).memory[block] = [1] * 16
    engine.adopt(request, (Token(1),))
