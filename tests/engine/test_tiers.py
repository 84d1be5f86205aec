"""Lower tiers under the engine: what leaves the pool comes back, and nobody's output knows of it. A fake model, and a
disk that works inline, so that every step can be checked."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import Clock, Story, expected, make_engine, make_request, prompt_of, run_all, runner_of
from tier_rig import store_for, tiered

from engine.engine import Engine
from engine.types import FinishReason, Request, TierLoad, Token
from kvtransfer.tiers.faults import TierFault

HOST_ONLY = {"host_blocks": 64}


def tier(engine: Engine, name: str = "host") -> TierLoad:
    return next(one for one in engine.load(0.0).tiers if one.name == name)


def flood(engine: Engine, seed: int = 50) -> None:
    """Fill the pool with something else, so that whatever nobody holds must go."""
    size = engine.info.total_blocks * engine.info.block_size
    run_all(engine, make_request(prompt_of(size - 1, seed), max_tokens=1))


def answered(engine: Engine, prompt: tuple[int, ...], **fields: object) -> Story:
    request = make_request(prompt, **fields)
    story = run_all(engine, request)
    assert story.tokens(request.request_id) == expected(prompt, 8)
    return story


def quiet(engine: Engine) -> bool:
    load = engine.load(0.0)
    return load.live_blocks == load.running == load.waiting == 0


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_that_left_the_pool_comes_back_from_host_memory(chunked: bool, block_size: int) -> None:
    engine, _ = tiered(16, HOST_ONLY, chunked_prefill=chunked, block_size=block_size)
    prompt = prompt_of(161)
    answered(engine, prompt)
    flood(engine)
    story = answered(engine, prompt, request_id="again")
    assert story.progress["again"][0].cached_tokens == 160
    assert tier(engine).hits == 160 // block_size
    assert quiet(engine)


def test_a_prompt_goes_through_host_memory_to_disk_and_back(tmp_path: Path) -> None:
    engine, store = tiered(16, {"host_blocks": 8, "disk": tmp_path})
    prompts = [prompt_of(161, seed) for seed in range(6)]
    for prompt in (*prompts, *prompts):
        answered(engine, prompt)
    assert tier(engine, "disk").hits > 30
    assert tier(engine, "disk").stored > 30
    store.check()


def test_the_next_turn_finds_the_answers_kv_too(tmp_path: Path) -> None:
    engine, _ = tiered(20, HOST_ONLY)
    first = make_request(prompt_of(64), "first", max_tokens=49)
    answer = run_all(engine, first).tokens("first")
    flood(engine)
    turn = (*prompt_of(64), *answer, 7)
    story = run_all(engine, make_request(turn, "second"))
    assert story.tokens("second") == expected(turn, 8)
    assert story.last("second").cached_tokens == 112


def test_kv_that_was_adopted_on_a_decode_worker_is_kept_when_its_blocks_are_leased_again() -> None:
    prefill = make_engine()
    decode, store = tiered(16, HOST_ONLY)
    for number in range(4):
        request = make_request(prompt_of(64, number), f"r{number}", max_tokens=20)
        prefill.submit(request, hold=True)
        first = tuple(Story(prefill).run().full(request.request_id))
        lease = decode.lease(request)
        assert lease is not None
        runner_of(prefill).copy(prefill.block_table(request.request_id), runner_of(decode), lease.block_ids)
        decode.adopt(request, first)
        assert Story(decode).run().tokens(request.request_id) == expected(request.token_ids, 20)[1:]
        prefill.release(request.request_id)
    assert tier(decode).stored >= 8
    turn = (*prompt_of(64, 0), *expected(prompt_of(64, 0), 20), 3)
    assert run_all(decode, make_request(turn, "next")).last("next").cached_tokens == 80
    assert decode.lease(make_request(prompt_of(64, 0), "lease")) is not None
    decode.abort("lease")
    store.check()


def test_two_of_the_same_prompt_share_one_load_and_a_salt_has_its_own() -> None:
    engine, _ = tiered(24, HOST_ONLY, max_num_batched_tokens=64)
    prompt = prompt_of(161)
    answered(engine, prompt)
    flood(engine)
    story = run_all(engine, *(make_request(prompt, name) for name in "ab"))
    assert [story.tokens(name) for name in "ab"] == [expected(prompt, 8)] * 2
    assert tier(engine).hits == 10
    assert engine.load(0.0).tier_loads == 1
    flood(engine, 51)
    salted = run_all(engine, make_request(prompt, "salted", cache_salt="other"))
    assert salted.last("salted").cached_tokens == 0
    assert tier(engine).hits == 10


@pytest.mark.parametrize(("damaged", "hits", "loads"), [(10, 0, 0), (1, 9, 1)])
def test_a_load_counts_if_it_brought_a_block(damaged: int, hits: int, loads: int) -> None:
    engine, store = tiered(16, HOST_ONLY)
    store.faults.add("put", TierFault.CORRUPT, count=damaged)  # of ten, the leaf first
    answered(engine, prompt_of(161))
    flood(engine)
    answered(engine, prompt_of(161), request_id="again")
    assert (tier(engine).hits, engine.load(0.0).tier_loads) == (hits, loads)


def test_prompt_logprobs_are_computed_whatever_lies_in_a_tier() -> None:
    engine, _ = tiered(16, HOST_ONLY)
    answered(engine, prompt_of(161))
    flood(engine)
    story = run_all(engine, make_request(prompt_of(161), "x", prompt_logprobs=1))
    assert len(next(one.prompt_logprobs for one in story.progress["x"] if one.prompt_logprobs)) == 161
    assert tier(engine).hits == 0


def test_computing_is_chosen_when_it_is_faster_and_the_decision_is_told() -> None:
    engine, _ = tiered(16, HOST_ONLY, mode="auto")
    answered(engine, prompt_of(161))
    flood(engine)
    # Steps of the fake model take a microsecond of its clock; the tier's set-up alone takes longer.
    for _ in range(40):
        answered(engine, prompt_of(161))
        flood(engine)
    load = engine.load(0.0)
    assert load.tier_recomputes > 0
    assert any("computes of the next" in line for line in engine.tier_decisions())


def test_decodes_copy_only_a_few_blocks_out_with_each_step() -> None:
    engine, store = tiered(64, {"host_blocks": 256})
    run_all(engine, *(make_request(prompt_of(160, seed), max_tokens=1) for seed in range(4)))
    assert store.counters()[0].stored == 0, "there are free blocks enough"
    engine.submit(make_request(prompt_of(16, 90), "long", max_tokens=200))
    story = Story(engine)
    seen = [store.counters()[0].stored]
    while engine.has_work():
        story.step()
        seen.append(store.counters()[0].stored)
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 6
    assert seen[-1] >= 40
    assert story.tokens("long") == expected(prompt_of(16, 90), 200)


# -- ends ----------------------------------------------------------------------------------------------------------


def loading(tmp_path: Path, **settings: object) -> tuple[Engine, Clock]:
    """An engine whose request "x" waits for a disk that has not answered yet."""
    engine, store = tiered(16, {"host_blocks": 12, "disk": tmp_path}, **settings)
    answered(engine, prompt_of(161))
    for seed in (51, 52, 53):
        flood(engine, seed)
    clock = engine._clock
    assert isinstance(clock, Clock)
    disk = store._disk
    assert disk is not None
    inline, pending = disk._io, []
    disk._io = type("Slow", (), {"alive": True, "submit": lambda _, job: pending.append(job), "ended": lambda _: []})()
    engine.submit(make_request(prompt_of(161), "x", deadline_s=clock.now + 50))
    Story(engine).step()
    engine.check()
    assert engine.load(0.0).waiting == 1
    assert engine.load(0.0).live_blocks > 0, "the load holds blocks"
    assert not engine.has_work(), "nobody spins while the disk works"
    disk._io = inline
    return engine, clock


def test_a_disk_that_does_not_answer_costs_the_loads_deadline_and_the_prompt_is_computed(tmp_path: Path) -> None:
    engine, clock = loading(tmp_path)
    due = engine.next_deadline()
    assert due is not None
    assert due < clock.now + 5
    clock.now = due
    assert engine.has_work()
    story = Story(engine).run()
    assert story.tokens("x") == expected(prompt_of(161), 8)
    assert story.last("x").cached_tokens == 0
    assert tier(engine, "disk").misses > 0
    assert engine.load(0.0).tier_loads == 0
    assert quiet(engine)


def test_who_waits_for_a_load_can_be_aborted_or_expire_and_the_blocks_come_back(tmp_path: Path) -> None:
    engine, clock = loading(tmp_path / "abort")
    assert engine.abort("x")
    engine.check()
    assert quiet(engine)
    engine, clock = loading(tmp_path / "expire")
    clock.now += 60
    story = Story(engine)
    story.step()
    assert story.last("x").finish is FinishReason.DEADLINE
    assert quiet(engine)


def test_forgetting_all_prefixes_ends_loads_and_empties_the_tiers(tmp_path: Path) -> None:
    engine, _ = loading(tmp_path)
    engine.reset_prefix_cache()
    engine.check()
    story = Story(engine).run()
    assert story.tokens("x") == expected(prompt_of(161), 8)
    assert story.last("x").cached_tokens == 0
    assert tier(engine, "disk").used_bytes == 0


def test_others_run_while_one_loads(tmp_path: Path) -> None:
    engine, _ = loading(tmp_path)
    story = run_all(engine, make_request(prompt_of(20, 77), "y")) if engine.has_work() else Story(engine)
    engine.submit(make_request(prompt_of(20, 78), "z"))
    while "z" not in story.progress or story.last("z").finish is None:
        assert story.step()
    assert story.tokens("z") == expected(prompt_of(20, 78), 8)
    assert engine.load(0.0).waiting == 1
    engine.abort("x")


def test_what_a_broken_step_left_behind_is_found_by_nobody_not_even_in_a_tier() -> None:
    engine, store = tiered(16, HOST_ONLY, max_num_batched_tokens=32)
    engine.submit(make_request(prompt_of(190), "x", max_tokens=30))
    story = Story(engine)
    while not story.progress.get("x") or not story.last("x").tokens:
        story.step()
    assert store.counters()[0].used_bytes > 0, "written behind while it runs"
    runner_of(engine).nan_for = "x"
    story.run()
    assert story.last("x").finish is FinishReason.ERROR
    runner_of(engine).nan_for = ""
    assert store.counters()[0].used_bytes == 0
    again = run_all(engine, make_request(prompt_of(190), "again"))
    assert again.last("again").cached_tokens == 0


@pytest.mark.parametrize("fault", [TierFault.FAIL, TierFault.CORRUPT])
@pytest.mark.parametrize("op", ["put", "write", "read"])
def test_a_tier_that_fails_every_third_time_changes_no_output(tmp_path: Path, op: str, fault: TierFault) -> None:
    engine, store = tiered(16, {"host_blocks": 6, "disk": tmp_path})
    prompts = [prompt_of(161, seed) for seed in range(5)]
    for turn in range(60):
        store.faults.add(op, fault, 3)
        engine._clock.now += 100  # type: ignore[attr-defined]  # a disk that failed has rested
        answered(engine, prompts[turn * 7 % 5])
    store.faults.clear()
    assert sum(one.failed for one in engine.load(0.0).tiers) > 0
    assert quiet(engine)


# -- what the router is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("announce", [True, False])
def test_prefixes_stay_announced_while_a_tier_has_them_where_that_is_wanted(announce: bool) -> None:
    engine, _ = tiered(16, {"host_blocks": 30}, announce=announce)
    known: dict[str, set[bytes]] = {}

    def hear() -> None:
        device = engine.drain_kv_events()
        if device.cleared:
            known.clear()
        for tier, (stored, removed, _) in {"device": device, **engine.drain_tier_events()}.items():
            mine = known.setdefault(tier, set())
            assert not mine & set(stored), "told twice"
            assert mine >= set(removed), "removed and never told"
            mine.update(stored)
            mine.difference_update(removed)

    answered(engine, prompt_of(161))
    hear()
    prompt = set(known["device"])
    assert len(prompt) == 10
    flood(engine)
    hear()
    assert not known["device"] >= prompt
    assert (known.get("host", set()) | known["device"] >= prompt) == announce
    for seed in (60, 61, 62):
        flood(engine, seed)
        hear()
    assert not set().union(*known.values()) & prompt, "out of the host tier as well"
    engine.retell_kv_events()
    before = {tier: set(keys) for tier, keys in known.items()}
    hear()
    assert known == before
    engine.reset_prefix_cache()
    hear()
    assert not any(known.values())


def test_a_prefix_that_goes_to_disk_is_told_of_both_tiers(tmp_path: Path) -> None:
    engine, store = tiered(16, {"host_blocks": 12, "disk": tmp_path}, announce=True)
    known: dict[str, set[bytes]] = {}
    for seed in range(6):
        answered(engine, prompt_of(161, seed))
        flood(engine, 50 + seed)
        engine.drain_kv_events()
        for tier, (stored, removed, _) in engine.drain_tier_events().items():
            mine = known.setdefault(tier, set())
            mine.update(stored)
            mine.difference_update(removed)
    assert known["host"]
    assert known["disk"]
    for tier, keys in known.items():
        assert {store.where([key]) for key in keys} == {(tier,)}


# -- anything goes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_every_block_has_an_owner_and_every_answer_is_right(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    mode = chance.choice(["always", "auto"])
    disk = tmp_path if seed % 2 else None
    engine, store = tiered(
        24,
        {"host_blocks": chance.choice([12, 24, 48]), "disk": disk, "disk_blocks": 40},
        mode=mode,
        announce=True,
        max_num_batched_tokens=chance.choice([24, 64, 512]),
        max_num_seqs=6,
        swap_slots=chance.choice([0, 20]),
    )
    prompts = [prompt_of(chance.randrange(20, 200), 3 * number) for number in range(10)]
    story = Story(engine)
    asked: dict[str, Request] = {}
    gone: set[str] = set()
    for turn in range(150):
        name = f"r{turn}"
        if chance.random() < 0.4:
            asked[name] = make_request(chance.choice(prompts), name, max_tokens=chance.randrange(1, 30))
            engine.submit(asked[name])
        if chance.random() < 0.05 and asked:
            victim = chance.choice(list(asked))
            if engine.abort(victim):
                gone.add(victim)
        if chance.random() < 0.1:
            lease = engine.lease(make_request(chance.choice(prompts), f"l{turn}"))
            if lease is not None:
                engine.abort(f"l{turn}")
        if chance.random() < 0.1:
            op = chance.choice(["put", "read", "write"])
            store.faults.add(op, chance.choice([TierFault.FAIL, TierFault.CORRUPT]), chance.randrange(1, 4))
        if chance.random() < 0.02:
            engine.reset_prefix_cache()
        engine._clock.now += chance.random()  # type: ignore[attr-defined]
        story.step()
        engine.drain_kv_events()
    story.run()
    for name, request in asked.items():
        if name not in gone:
            assert story.tokens(name) == expected(request.token_ids, request.sampling.max_tokens), name
    assert quiet(engine)
    load = engine.load(0.0)
    assert load.tier_loads + load.tier_recomputes > 0
    assert engine.lease(make_request(prompts[0], "last")) is not None
    assert engine.adopt(make_request(prompts[0], "last"), (Token(expected(prompts[0], 1)[0]),)) == ()
    engine.abort("last")


def test_an_engine_without_bytes_has_no_tiers() -> None:
    engine = make_engine()
    store = store_for(engine, host_blocks=4, clock=Clock())
    with pytest.raises(TypeError, match="cannot be copied"):
        engine.attach_tiers(store)
