"""What prefix caching promises at scale: no false hit in ten thousand prompts; leaves go before roots, oldest first."""

from __future__ import annotations

import random

from fakes import Story, expected, make_engine, make_request, prompt_of, run_all

PROMPTS = 10_000


def test_ten_thousand_random_prompts_without_a_false_hit() -> None:
    """Prompts grow out of a few stems, part at any token, carry salts, and far outnumber the blocks. A false hit would
    change the output, which is a hash of the whole history read back through the blocks."""
    chance = random.Random(17)
    engine = make_engine(96, max_num_batched_tokens=4096)
    stems = [prompt_of(96, seed) for seed in range(6)]
    hits = 0
    for number in range(PROMPTS // 50):
        batch = []
        for i in range(50):
            stem = chance.choice(stems)
            cut = chance.randint(1, len(stem))
            tail = tuple(chance.randrange(90) for _ in range(chance.randint(0, 20)))
            prompt = (*stem[:cut], *tail)
            batch.append(make_request(prompt, f"p{i}", max_tokens=1, cache_salt=chance.choice(("", "", "a", "b"))))
        for request in batch:
            engine.submit(request)
        story = Story(engine)
        while engine.has_work():
            result = engine.step(0.0)
            for one in result.progress if result else ():
                story.progress.setdefault(one.request_id, []).append(one)
        for request in batch:
            assert story.tokens(request.request_id) == expected(request.token_ids, 1), f"batch {number}"
        if number % 20 == 0:
            engine.check()
            stems[chance.randrange(6)] = tuple(chance.randrange(90) for _ in range(96))
    load = engine.load(0.0)
    hits = load.prefix_hits
    assert 0.2 < hits / load.prefix_queries < 0.95, "both hits and misses were tried"


def test_eviction_takes_the_oldest_leaf_first_and_a_used_prefix_stays() -> None:
    engine = make_engine(16)
    for seed in range(3):
        run_all(engine, make_request(prompt_of(64, seed), f"s{seed}", max_tokens=1))
    run_all(engine, make_request(prompt_of(64, 0), "again", max_tokens=1))
    held = [run_hit(engine, seed) for seed in (0,)]
    assert held == [48], "a prefix that was used again is not the oldest"
    run_all(engine, make_request(prompt_of(96, 9), "pressure", max_tokens=1))
    assert run_hit(engine, 0) == 48
    assert run_hit(engine, 1) < 48, "its last blocks went first"


def run_hit(engine, seed: int) -> int:  # type: ignore[no-untyped-def]
    return run_all(engine, make_request(prompt_of(64, seed), "probe", max_tokens=1)).last("probe").cached_tokens
