"""Several sequences of one request: they fork block tables, and a writer copies only the block that it changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fakes import EOS, Clock, Story, expected, make_engine, make_request, prompt_of, run_all, runner_of

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.types import FinishReason, Progress, Request, SamplingParams


def by_index(story: Story, request_id: str) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for one in story.progress.get(request_id, ()):
        out.setdefault(one.index, []).extend(token.token_id for token in one.tokens)
    return out


def ended(story: Story, request_id: str) -> list[Progress]:
    return [one for one in story.progress[request_id] if one.finish is not None]


def sampled(request_id: str, **fields: object) -> Request:
    return make_request(prompt_of(50), request_id, temperature=1.0, seed=9, max_tokens=40, **fields)


# -- n and best_of -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 50])
def test_n_sequences_are_what_n_requests_would_be_and_the_prompt_is_computed_once(length: int) -> None:
    alone = make_engine()
    single = [
        make_request(prompt_of(length), f"s{i}", temperature=1.0, seed=9, sequence_index=i, max_tokens=40)
        for i in range(3)
    ]
    want = run_all(alone, *single)
    engine = make_engine()
    story = run_all(engine, make_request(prompt_of(length), "x", n=3, temperature=1.0, seed=9, max_tokens=40))
    assert by_index(story, "x") == {i: want.tokens(f"s{i}") for i in range(3)}
    assert len(set(map(tuple, by_index(story, "x").values()))) == 3
    assert engine.load(0.0).prompt_tokens == length
    assert sorted(one.index for one in ended(story, "x")) == [0, 1, 2]
    assert engine.load(0.0).live_blocks == 0


def test_only_the_block_that_is_written_is_copied_and_the_last_writer_copies_nothing() -> None:
    engine = make_engine(128)
    engine.submit(make_request(prompt_of(1000), "x", n=4, temperature=1.0, max_tokens=40))
    story = Story(engine)
    while len(by_index(story, "x")) < 4:
        story.step()
    alone = -(-1000 // 16)
    assert engine.load(0.0).live_blocks == alone
    story.step()
    assert len(runner_of(engine).plans[-1].copies) == 3
    assert engine.load(0.0).live_blocks == alone + 3 < 1.2 * alone
    story.run()
    assert sum(len(plan.copies) for plan in runner_of(engine).plans) == 3


def test_a_prompt_that_ends_with_its_block_leaves_nothing_to_copy() -> None:
    engine = make_engine()
    run_all(engine, make_request(prompt_of(64), n=4, temperature=1.0))
    assert not any(plan.copies for plan in runner_of(engine).plans)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_siblings_say_the_same_under_preemption(preemption: str, caching: bool) -> None:
    want = by_index(run_all(make_engine(), sampled("x", n=4)), "x")
    engine = make_engine(11, preemption=preemption, swap_slots=40, prefix_caching=caching)
    got = run_all(engine, sampled("x", n=4), make_request(prompt_of(40, 3), "other", max_tokens=60))
    assert engine.load(0.0).preemptions > 0
    assert by_index(got, "x") == want
    assert got.tokens("other") == expected(prompt_of(40, 3), 60)


def test_the_best_of_several_are_told_at_the_end_best_first() -> None:
    everything = run_all(make_engine(), sampled("x", n=5, logprobs=0))
    scores = {}
    for index in range(5):
        tokens = [token for one in everything.progress["x"] if one.index == index for token in one.tokens]
        scores[index] = sum(token.logprob or 0.0 for token in tokens) / len(tokens)
    ranked = sorted(scores, key=lambda index: -scores[index])
    story = run_all(make_engine(), sampled("x", n=2, best_of=5))
    told = [one for one in story.progress["x"] if one.tokens]
    assert [one.index for one in told] == [0, 1]
    for one, index in zip(told, ranked, strict=False):
        assert [token.token_id for token in one.tokens] == by_index(everything, "x")[index]
        assert one.score == pytest.approx(scores[index])
        assert one.finish is FinishReason.LENGTH
        assert all(token.logprob is None for token in one.tokens)


def test_abort_deadline_and_errors_end_all_of_a_family() -> None:
    for fields in ({"n": 3}, {"best_of": 3}, {"beam_width": 3}):
        clock = Clock()
        engine = make_engine(clock=clock)
        engine.submit(sampled("x", deadline_s=clock.now + 5, **fields))
        story = Story(engine)
        for _ in range(3):
            story.step()
        with pytest.raises(InvalidRequest, match="already"):
            engine.submit(sampled("x"))
        assert engine.abort("x")
        engine.check()
        assert engine.load(0.0).live_blocks == 0
        engine.submit(sampled("x", deadline_s=clock.now + 5, **fields))
        story.step()
        story.step()
        story.step(clock.now + 10)
        assert {one.finish for one in ended(story, "x")} == {FinishReason.DEADLINE}
        engine.submit(sampled("x", **fields))
        story.step()
        runner_of(engine).broken = RuntimeError("no memory")
        story.step()
        assert story.last("x").finish is FinishReason.ERROR
        assert not engine.has_work()


def test_siblings_may_end_at_different_times() -> None:
    request = sampled("x", n=6, ignore_eos=False, logit_bias=((EOS, 5.0),))
    story = run_all(make_engine(), request)
    lengths = [len(tokens) for _, tokens in sorted(by_index(story, "x").items())]
    assert len(set(lengths)) > 1
    assert {one.finish for one in ended(story, "x")} >= {FinishReason.STOP}


# -- hand-over -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "best_of": 4}, {"beam_width": 3, "n": 3}])
def test_several_sequences_are_handed_over_once(fields: dict[str, int]) -> None:
    want = run_all(make_engine(), sampled("x", **fields))
    prefill, decode = make_engine(), make_engine()
    request = sampled("x", **fields)
    prefill.submit(request, hold=True)
    told = Story(prefill).run().progress["x"][-1]
    assert told.finish is None
    lease = decode.lease(request)
    assert lease is not None
    runner_of(prefill).copy(prefill.block_table("x"), runner_of(decode), lease.block_ids)
    story = Story(decode)
    story.hear(decode.adopt(request, told.tokens))
    prefill.release("x")
    assert prefill.load(0.0).live_blocks == 0
    story.run()
    assert by_index(story, "x") == by_index(want, "x")
    assert decode.load(0.0).live_blocks == 0


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "best_of": 4}, {"beam_width": 3, "n": 2}])
def test_a_held_request_whose_first_tokens_all_end_it_tells_its_results(fields: dict[str, int]) -> None:
    request = replace(sampled("x", **fields), sampling=SamplingParams(max_tokens=1, seed=9))
    want, engine = run_all(make_engine(), request), make_engine()
    engine.submit(request, hold=True)
    told = Story(engine).run().progress["x"]
    assert [(one.index, one.tokens, one.finish, one.score) for one in told] == [
        (one.index, one.tokens, one.finish, one.score) for one in want.progress["x"]
    ]
    assert {one.finish for one in told} == {FinishReason.LENGTH}
    engine.release("x")
    assert engine.load(0.0).live_blocks == 0


def test_one_of_several_sequences_can_be_ended_and_the_others_say_the_same() -> None:
    want = by_index(run_all(make_engine(), sampled("x", n=3)), "x")
    engine = make_engine()
    engine.submit(sampled("x", n=3))
    story = Story(engine)
    while len(by_index(story, "x")) < 3:
        story.step()
    for gone in (0, 2):
        assert engine.abort("x", index=gone)
        assert not engine.abort("x", index=gone)
    story.run()
    got = by_index(story, "x")
    assert got[1] == want[1]
    assert len(got[0]) == len(got[2]) == 1
    assert engine.load(0.0).live_blocks == 0


def test_of_sequences_that_are_told_together_none_is_spared() -> None:
    for fields in ({"best_of": 3}, {"beam_width": 3}):
        want = by_index(run_all(make_engine(), sampled("x", **fields)), "x")
        engine = make_engine()
        engine.submit(sampled("x", **fields))
        story = Story(engine)
        for _ in range(3):
            story.step()
        assert not engine.abort("x", index=0)
        assert by_index(story.run(), "x") == want


# -- beams ---------------------------------------------------------------------------------------------------------


def test_beams_share_a_long_prompt() -> None:
    live = {}
    for width in (1, 4):
        engine = make_engine(128)
        engine.submit(make_request(prompt_of(1000), "x", beam_width=width, max_tokens=30))
        story = Story(engine)
        story.step()
        while engine.load(0.0).running < width:
            story.step()
        story.step()
        live[width] = engine.load(0.0).live_blocks
        story.run()
    assert live[4] < 1.2 * live[1]


@pytest.mark.parametrize("caching", [True, False])
def test_beams_find_the_same_under_preemption(caching: bool) -> None:
    def beams() -> Request:
        return make_request(prompt_of(40), "x", beam_width=3, n=3, max_tokens=50, priority=-1)

    want = by_index(run_all(make_engine(), beams()), "x")
    engine = make_engine(18, prefix_caching=caching)
    others = [make_request(prompt_of(40, 3 + i), f"o{i}", max_tokens=60) for i in range(2)]
    engine.submit(beams())
    story = Story(engine)
    for _ in range(5):
        story.step()
    for other in others:
        engine.submit(other)
    story.run()
    assert engine.load(0.0).preemptions > 0
    assert by_index(story, "x") == want
    for i, other in enumerate(others):
        assert story.tokens(other.request_id) == expected(prompt_of(40, 3 + i), 60)


def test_beams_that_the_pool_can_never_hold_are_refused() -> None:
    engine = make_engine(12)
    with pytest.raises(InvalidRequest, match="12") as caught:
        engine.submit(make_request(prompt_of(64), beam_width=4, max_tokens=60))
    assert caught.value.field == "beam_width"
    for fields in (
        {"beam_width": 2, "n": 3},
        {"best_of": 1, "n": 2},
        {"n": 0},
        {"early_stopping": "maybe"},
        {"beam_width": 2, "logprobs": 1},
        {"beam_width": 2, "presence_penalty": 0.5},
    ):
        with pytest.raises(InvalidRequest):
            engine.submit(make_request(prompt_of(10), **fields))
    assert not engine.has_work()


def test_random_families_keep_every_block_accounted_for() -> None:
    chance = random.Random(3)
    engine = make_engine(24, max_num_seqs=6, max_num_batched_tokens=48, swap_slots=10, preemption="swap")
    story, names = Story(engine), []
    kinds = [{"n": 2}, {"n": 3, "best_of": 4}, {"beam_width": 3}, {}]
    for number in range(150):
        if chance.random() < 0.5:
            names.append(f"q{number}")
            length, most = chance.randint(1, 60), chance.randint(1, 80)
            engine.submit(
                make_request(
                    prompt_of(length, length % 3),
                    names[-1],
                    max_tokens=most,
                    temperature=1.0,
                    priority=chance.randint(0, 3),
                    **chance.choice(kinds),
                )
            )
        elif chance.random() < 0.2 and names:
            engine.abort(chance.choice(names))
        story.step()
    story.run()
    load = engine.load(0.0)
    assert (load.live_blocks, load.swap_used_blocks, load.running, load.waiting) == (0, 0, 0, 0)
    assert load.preemptions > 0


# -- against transformers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A tiny random Llama of transformers, and its directory."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=7,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("peer")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("early_stopping", ["yes", "no", "never"])
def test_sequences_and_scores_are_those_of_transformers(peer, width, length_penalty, early_stopping) -> None:  # type: ignore[no-untyped-def]
    model, path = peer
    engine = Engine.open(EngineConfig(model=str(path), num_blocks=64))
    words = {"yes": True, "no": False, "never": "never"}
    stopped = 0
    for seed in range(4):
        prompt = tuple((seed * 13 + i * i) % 60 + 2 for i in range(20 + seed))
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=18,
                length_penalty=length_penalty,
                early_stopping=words[early_stopping],
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        request = make_request(
            prompt,
            f"b{seed}",
            beam_width=width,
            n=width,
            max_tokens=18,
            ignore_eos=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        story = run_all(engine, request)
        got = [one for one in story.progress[request.request_id] if one.tokens]
        for one, tokens, score in zip(got, want.sequences.tolist(), want.sequences_scores.tolist(), strict=True):
            wanted = tokens[len(prompt) :]
            if 7 in wanted:
                wanted = wanted[: wanted.index(7) + 1]
                stopped += 1
            assert [token.token_id for token in one.tokens] == wanted
            assert one.score == pytest.approx(score, abs=1e-3)
    assert stopped or length_penalty == 2.0, "some beam ends by itself, unless length pays"
    assert engine.load(0.0).live_blocks == 0
