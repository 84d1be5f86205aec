"""The gateway: what it refuses, what it fills in, and the text that comes out."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from scripted import PIECES, VOCAB, Bench, ScriptedRouter, bench, ids, toy_text, until, worker

from cluster.gateway import Job, Piece
from cluster.validate import MOST_TIMEOUT_S, Ask, RequestFailed
from engine.hashing import GRANULE
from engine.types import Branching, FinishReason, SamplingParams, Token
from tandem.messages import Abort, Code, Delta


def _ask(prompt: str | tuple[int, ...] = "hello", **sampling: Any) -> Ask:
    return Ask(prompts=(prompt,), sampling=SamplingParams(**{"max_tokens": 40, **sampling}))


async def _pieces(made: Bench, job: Job, index: int = 0) -> list[Piece]:
    async with asyncio.timeout(5), aclosing(made.gateway.answer(job, index)) as pieces:
        return [piece async for piece in pieces]


async def _text(made: Bench, ask: Ask) -> tuple[str, Piece]:
    pieces = await _pieces(made, await made.gateway.prepare(ask))
    assert all(piece.finish is None for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces), pieces[-1]


async def _refusal(made: Bench, ask: Ask) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await made.gateway.prepare(ask)
    assert not made.workers.asked
    return caught.value


# -- answers ------------------------------------------------------------------------------------------------------


async def test_an_answer_is_the_text_of_its_tokens_and_ends_with_its_outcome() -> None:
    async with bench() as made:
        text, last = await _text(made, _ask())
        assert text == "Hello, world"
        assert last.finish is FinishReason.STOP
        assert last.outcome is not None
        assert last.outcome.completion_tokens == 12


REPLY = [*ids("1. the"), 259, *ids(" "), *ids("br"), 261, 262, *ids("\nüber")]
"""Says `1. the quick brown fox⏎über`, in bytes and longer pieces."""


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("uick b", "1. the q"),
        ("brown fox\n", "1. the quick "),
        ("\n", "1. the quick brown fox"),
        ("ü", "1. the quick brown fox\n"),
        ("1", ""),
        ("fox jumps", "1. the quick brown fox\nüber"),
        ("ber!", "1. the quick brown fox\nüber"),
    ],
)
async def test_stop_strings_cut_the_text_wherever_the_tokens_begin_and_end(stop: str, expected: str) -> None:
    async with bench() as made:
        made.workers.reply = lambda request: REPLY
        text, last = await _text(made, _ask(stop=(stop,)))
        assert PIECES[0] == " quick"
        assert text == expected
        assert last.finish is FinishReason.STOP
        await made.dispatch.drained()
        met = expected != "1. the quick brown fox\nüber"
        ended_by_itself = not met
        assert any(isinstance(question, Abort) for _, question in made.workers.asked) is not ended_by_itself


async def test_tokens_after_a_stop_string_are_not_delivered() -> None:
    async with bench() as made:
        made.workers.reply = lambda request: ids("ab.cd")
        pieces = await _pieces(made, await made.gateway.prepare(_ask(stop=(".",), logprobs=0)))
        assert [token.token_id for piece in pieces for token in piece.tokens] == ids("ab.")
        assert [outcome.code for outcome in made.outcomes] == [None]


async def test_a_stop_string_counts_from_the_first_token_after_min_tokens() -> None:
    async with bench() as made:
        made.workers.reply = lambda request: ids("a.b.c.d")
        text, last = await _text(made, _ask(stop=(".",), min_tokens=3))
        assert text == "a.b"
        assert last.outcome is not None
        assert last.outcome.completion_tokens == 4


async def test_include_stop_adds_it() -> None:
    async with bench() as made:
        ask = Ask(prompts=("x",), sampling=SamplingParams(stop=("lo",), max_tokens=40), include_stop=True)
        text, _ = await _text(made, ask)
        assert text == "Hello"


async def test_a_stop_token_id_has_no_text() -> None:
    async with bench() as made:
        made.workers.reply = lambda request: ids("abc")
        made.workers.finish = FinishReason.STOP
        text, last = await _text(made, _ask(stop_token_ids=(ord("c"),)))
        assert text == "ab"
        assert last.outcome is not None
        assert last.outcome.completion_tokens == 3


async def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    async with bench() as made:
        made.workers.reply = lambda request: [*ids("a"), 0xE2, 0x82]
        text, _ = await _text(made, _ask())
        assert text == "a\ufffd"


async def test_several_tokens_in_one_delta_are_all_delivered() -> None:
    async with bench() as made:
        made.workers.silent = True
        job = await made.gateway.prepare(_ask())
        reading = asyncio.create_task(_pieces(made, job))
        await until(lambda: "r0" in made.workers.running)
        tokens = tuple(made.workers._tokens(job.requests[0]))
        made.workers.deliver(made.router.infos[1].ref, Delta("r0", 0, tokens, FinishReason.LENGTH))
        pieces = await reading
        assert "".join(piece.text for piece in pieces) == "Hello, world"
        made.workers.go.set()
        await until(lambda: not made.workers.running)


async def test_an_answer_aborted_by_its_id_ends_with_what_it_has() -> None:
    async with bench() as made:
        made.workers.hold = True
        job = await made.gateway.prepare(_ask())
        reading = asyncio.create_task(_pieces(made, job))
        await until(lambda: "r0" in made.workers.running)
        assert made.gateway.abort("r0")
        assert (await reading)[-1].finish is FinishReason.ABORT
        assert not made.gateway.abort("r0")


async def test_failures_tell_the_client_what_to_do_and_keep_inner_stories_for_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as made:
        made.workers.finish = FinishReason.ERROR
        with pytest.raises(RequestFailed, match="the server failed on request r0") as caught:
            await _text(made, _ask())
        assert caught.value.code is Code.INTERNAL
        assert "r0 failed" in caplog.text


# -- several answers ----------------------------------------------------------------------------------------------


async def _merged(made: Bench, job: Job) -> tuple[list[str], list[Piece]]:
    """The text of each answer and its last piece."""
    texts = [""] * (len(job.requests) * job.answers_each)
    last = [Piece()] * len(texts)
    async with asyncio.timeout(5), aclosing(made.gateway.answers(job)) as answers:
        async for index, piece in answers:
            assert last[index].finish is None, "nothing follows an answer's end"
            texts[index] += piece.text
            last[index] = piece
    return texts, last


async def test_n_answers_to_a_prompt_are_one_request_and_are_merged() -> None:
    async with bench() as made:
        ask = Ask(prompts=("a", "b"), n=2, sampling=SamplingParams(max_tokens=4))
        job = await made.gateway.prepare(ask)
        assert [request.request_id for request in job.requests] == ["r0-0", "r0-1"]
        assert {request.branching for request in job.requests} == {Branching(n=2)}
        assert {request.sampling.seed for request in job.requests} == {7}
        assert [view.sequences for view in job.views] == [2, 2]
        texts, last = await _merged(made, job)
        assert texts == ["Hell"] * 4
        assert {piece.finish for piece in last} == {FinishReason.LENGTH}
        assert [outcome.completion_tokens for outcome in made.outcomes] == [8, 8]


async def test_one_answer_of_several_that_meets_its_stop_string_is_cut_and_the_others_run_on() -> None:
    async with bench() as made:
        made.workers.silent = True
        job = await made.gateway.prepare(Ask(prompts=("a",), n=3, sampling=SamplingParams(max_tokens=4, stop=(".",))))
        reading = asyncio.create_task(_merged(made, job))
        await until(lambda: "r0" in made.workers.running)
        decode = made.router.infos[1].ref

        def say(index: int, seq: int, text: str, finish: FinishReason | None = None) -> None:
            tokens = tuple(Token(token_id) for token_id in ids(text))
            made.workers.deliver(decode, Delta("r0", seq, tokens, finish, index=index))

        say(0, 0, "a")
        say(1, 0, "b.")
        await until(lambda: ("r0", 1) in made.workers.cut)
        say(1, 2, "no", FinishReason.LENGTH)
        say(2, 0, "cc", FinishReason.STOP)
        say(0, 1, "aa.", FinishReason.LENGTH)
        texts, last = await reading
        assert texts == ["aaa", "b", "cc"]
        assert [piece.finish for piece in last] == [FinishReason.STOP] * 3
        assert [piece.outcome is not None for piece in last] == [True, False, False]
        assert [outcome.completion_tokens for outcome in made.outcomes] == [8]
        assert made.workers.cut == {("r0", 1)}
        made.workers.go.set()
        await until(lambda: not made.workers.running)


async def test_when_every_answer_met_its_stop_string_the_request_is_over() -> None:
    async with bench() as made:
        job = await made.gateway.prepare(Ask(prompts=("a",), n=3, sampling=SamplingParams(max_tokens=40, stop=("l",))))
        texts, last = await _merged(made, job)
        assert texts == ["He"] * 3
        assert {piece.finish for piece in last} == {FinishReason.STOP}
        await made.dispatch.drained()
        assert made.workers.cut == {("r0", 0), ("r0", 1)}
        assert made.workers.aborted == {"r0"}


@pytest.mark.parametrize("several", [{"best_of": 4}, {"beam_width": 4}])
async def test_what_is_chosen_at_the_end_has_scores_and_is_cut_at_stop_strings(several: dict[str, int]) -> None:
    async with bench() as made:
        ask = Ask(prompts=("a",), n=2, sampling=SamplingParams(max_tokens=40, stop=("wor",)), **several)  # type: ignore[arg-type]
        job = await made.gateway.prepare(ask)
        assert job.requests[0].sequences == 4
        texts, last = await _merged(made, job)
        assert texts == ["Hello, "] * 2
        assert [(piece.score, piece.finish) for piece in last] == [(-0.5, FinishReason.STOP), (-1.5, FinishReason.STOP)]
        assert made.outcomes[0].itl_s == ()
        assert not made.workers.cut


async def test_several_answers_aborted_by_their_id_all_end_with_what_they_have() -> None:
    async with bench() as made:
        made.workers.hold = True
        job = await made.gateway.prepare(Ask(prompts=("a",), n=2, sampling=SamplingParams(max_tokens=4)))
        reading = asyncio.create_task(_merged(made, job))
        await until(lambda: "r0" in made.dispatch._flights and made.dispatch._flights["r0"].tokens == 2)
        assert made.gateway.abort("r0")
        texts, last = await reading
        assert texts == ["H", "H"]
        assert [piece.finish for piece in last] == [FinishReason.ABORT] * 2


async def test_several_answers_that_all_end_with_their_first_token_never_start_decode() -> None:
    async with bench() as made:
        made.workers.early = True
        job = await made.gateway.prepare(Ask(prompts=("a",), n=3, sampling=SamplingParams(max_tokens=1)))
        texts, _ = await _merged(made, job)
        assert texts == ["H"] * 3
        assert made.outcomes[0].decode == ""


async def test_answers_at_once_are_limited_by_all_that_are_generated() -> None:
    async with bench(max_streams=3) as made:
        assert (await _refusal(made, Ask(prompts=("a",), n=1, best_of=4))).code is Code.NO_ROOM
        assert (await made.gateway.prepare(Ask(prompts=("a",), best_of=3))).requests[0].sequences == 3


async def test_one_failure_among_several_answers_ends_them_all() -> None:
    async with bench() as made:
        made.workers.hold = True
        job = await made.gateway.prepare(Ask(prompts=("a",), n=3, sampling=SamplingParams(max_tokens=4)))
        with pytest.raises(RequestFailed):  # noqa: PT012 - the failure comes while it is read
            async with aclosing(made.gateway.answers(job)) as answers:
                async for _ in answers:
                    if len(made.workers.running) == 1:
                        made.hub.lost("decode-0", "1", "killed")


async def test_leaving_several_answers_aborts_them_all() -> None:
    async with bench() as made:
        made.workers.hold = True
        job = await made.gateway.prepare(Ask(prompts=("a",), n=3, sampling=SamplingParams(max_tokens=4)))
        async with aclosing(made.gateway.answers(job)) as answers:
            await anext(answers)
            await until(lambda: len(made.workers.running) == 1)
        await made.dispatch.drained()
        assert made.workers.aborted == {"r0"}


# -- what is filled in --------------------------------------------------------------------------------------------


async def test_a_request_carries_class_salt_deadline_and_prefix_keys() -> None:
    async with bench() as made:
        ask = Ask(prompts=(tuple(range(40)),), sla_class="fast", cache_salt="s", sampling=SamplingParams(max_tokens=4))
        job = await made.gateway.prepare(ask)
        request, view = job.requests[0], job.views[0]
        assert (request.sla_class, request.priority, request.ttft_s, request.itl_s) == ("fast", 5, 0.2, 0.05)
        assert request.deadline_s == request.arrival_s + 5.0
        assert request.cache_salt == "s"
        assert len(view.prefix_keys) == 40 // GRANULE
        other = await made.gateway.prepare(Ask(prompts=(tuple(range(40)),), sampling=SamplingParams(max_tokens=4)))
        assert not set(view.prefix_keys) & set(other.views[0].prefix_keys)
        assert other.requests[0].deadline_s == other.requests[0].arrival_s + 20.0


async def test_what_the_client_says_goes_before_its_class() -> None:
    async with bench() as made:
        ask = Ask(prompts=("a",), sla_class="fast", priority=-1, timeout_s=1.5, ttft_s=9.0, seed=-1)
        request = (await made.gateway.prepare(ask)).requests[0]
        assert (request.priority, request.ttft_s, request.itl_s) == (-1, 9.0, 0.05)
        assert request.deadline_s == request.arrival_s + 1.5
        assert request.sampling.seed == 2**63 - 1


async def test_prompt_logprobs_use_no_prefix() -> None:
    async with bench() as made:
        job = await made.gateway.prepare(_ask(tuple(range(40)), prompt_logprobs=1))
        assert job.views[0].prefix_keys == ()


async def test_a_chat_without_max_tokens_may_fill_the_smaller_of_context_and_pool() -> None:
    infos = (worker("p", "prefill", total_blocks=4), worker("d", "decode", total_blocks=10, max_model_len=512))
    async with bench(router=ScriptedRouter(infos=infos)) as made:
        ask = Ask(prompts=(tuple(range(100)),), fill_context=True)
        assert (await made.gateway.prepare(ask)).requests[0].sampling.max_tokens == 60


async def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    async with bench(
        router=ScriptedRouter(infos=(worker("d", "decode", total_blocks=999, max_model_len=9999),))
    ) as made:
        job = await made.gateway.prepare(_ask("x" * 5000))
        assert len(job.requests[0].token_ids) == 5000


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (Ask(), "prompt"),
        (Ask(prompts=("",)), "prompt"),
        (Ask(prompts=("a", ())), "prompt"),
        (Ask(messages=()), "messages"),
        (Ask(messages=({"role": "user", "content": ""},)), "messages.0.content"),
        (_ask((1, -1)), "prompt"),
        (_ask((512,)), "prompt"),
        (_ask((2**63,)), "prompt"),
        (_ask(stop_token_ids=(512,)), "stop_token_ids"),
        (_ask(logit_bias=((2**31, 1.0),)), "logit_bias"),
        (_ask(temperature=float("nan")), "temperature"),
        (_ask(top_p=float("inf")), "top_p"),
        (_ask(min_tokens=41), "min_tokens"),
        (_ask(stop=("",)), "stop"),
        (_ask(stop=("x",) * 65), "stop"),
        (_ask(max_tokens=0), "max_tokens"),
        (_ask(max_tokens=508), "max_tokens"),
        (_ask((1,) * 512), "prompt"),
        (_ask("x" * 512), "prompt"),
        (_ask("x" * 100_000), "prompt"),
        (Ask(messages=({"role": "user", "content": "x" * 100_000},)), "messages"),
        (Ask(messages=({"role": "x" * 100_000, "content": "x"},)), "messages"),
        (Ask(prompts=("a",), n=0), "n"),
        (Ask(prompts=("a",), n=129), "n"),
        (Ask(prompts=("a",), n=2, best_of=1), "best_of"),
        (Ask(prompts=("a",), best_of=0), "best_of"),
        (Ask(prompts=("a",), n=3, beam_width=2), "n"),
        (Ask(prompts=("a",), n=3, beam_width=2, names={"beam_width": "best_of"}), "n"),
        (Ask(prompts=("a",), beam_width=129), "beam_width"),
        (Ask(prompts=("a",), beam_width=129, names={"beam_width": "best_of"}), "best_of"),
        (Ask(prompts=("a",), beam_width=-1), "beam_width"),
        (Ask(prompts=("a",), beam_width=2, best_of=2), "best_of"),
        (Ask(prompts=("a",), beam_width=2, early_stopping="maybe"), "early_stopping"),
        (Ask(prompts=("a",), beam_width=2, length_penalty=float("nan")), "length_penalty"),
        (Ask(prompts=("a",), beam_width=2, sampling=SamplingParams(logprobs=1)), "logprobs"),
        (Ask(prompts=("a",), length_penalty=1.0), "length_penalty"),
        (Ask(prompts=("a",), early_stopping="yes"), "early_stopping"),
        (Ask(prompts=("a",), cache_salt=""), "cache_salt"),
        (Ask(prompts=("a",), sla_class="gold"), "sla_class"),
        (Ask(prompts=("a",), timeout_s=float("nan")), "timeout_s"),
        (Ask(prompts=("a",), timeout_s=-1.0), "timeout_s"),
        (Ask(prompts=("a",), ttft_s=-1.0), "ttft_s"),
        (Ask(prompts=("a",), request_id="a~1"), "request_id"),
        (Ask(prompts=("a",), seed=2**64), "seed"),
        (Ask(prompts=("a",), max_tokens=-1, names={"max_tokens": "max_completion_tokens"}), "max_completion_tokens"),
    ],
)
async def test_a_bad_ask_is_refused_by_its_field_before_any_worker_hears_of_it(ask: Ask, field: str) -> None:
    async with bench() as made:
        refusal = await _refusal(made, ask)
        assert (refusal.code, refusal.param) == (Code.INVALID, field)
        assert refusal.message.startswith(field + ": ")
        assert made.refused == [Code.INVALID]
        assert (await _text(made, _ask()))[0] == "Hello, world"


async def test_a_request_larger_than_the_kv_pool_is_refused_with_its_capacity() -> None:
    async with bench(router=ScriptedRouter(infos=(worker("d", "decode", total_blocks=4),))) as made:
        refusal = await _refusal(made, _ask((1,) * 64, max_tokens=1))
        assert refusal.code is Code.INVALID
        assert "64 tokens" in refusal.message
        assert "KV pool" in (await _refusal(made, _ask((1,) * 60, max_tokens=10))).message


class _Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)


async def test_a_text_far_above_the_context_is_refused_without_tokenizing_all_of_it() -> None:
    text = toy_text()
    counting = _Counting(text._tokenizer)
    text._tokenizer = counting  # type: ignore[assignment]
    async with bench(text=text) as made:
        assert "512 tokens" in (await _refusal(made, _ask("x" * 1_000_000))).message
        assert counting.characters < 5_000


async def test_a_timeout_without_end_and_a_top_k_without_bound_are_served() -> None:
    async with bench() as made:
        ask = Ask(prompts=("a",), timeout_s=1e300, sampling=SamplingParams(max_tokens=40, top_k=10**30))
        (request,) = (await made.gateway.prepare(ask)).requests
        assert request.deadline_s is not None
        assert request.deadline_s - request.arrival_s == MOST_TIMEOUT_S
        assert request.sampling.top_k == VOCAB
        assert (await _text(made, ask))[0] == "Hello, world"


async def test_an_unknown_model_is_not_found_and_not_repeated() -> None:
    async with bench() as made:
        refusal = await _refusal(made, Ask(model="canary" * 1000, prompts=("a",)))
        assert (refusal.code, refusal.param) == (Code.NOT_FOUND, "model")
        assert "canary" not in refusal.message


async def test_without_workers_requests_are_refused_fast() -> None:
    async with bench(router=ScriptedRouter(infos=())) as made:
        assert (await _refusal(made, _ask())).code is Code.UNAVAILABLE
        assert "decode" in await made.gateway.not_ready()


async def test_the_id_of_a_running_request_cannot_be_taken_again() -> None:
    async with bench() as made:
        made.workers.hold = True
        ask = Ask(prompts=("a",), request_id="mine")
        reading = asyncio.create_task(_pieces(made, await made.gateway.prepare(ask)))
        await until(lambda: "mine.r0" in made.workers.running)
        with pytest.raises(RequestFailed, match="request_id"):
            await made.gateway.prepare(ask)
        made.workers.go.set()
        await reading


async def test_of_two_that_come_at_once_under_one_id_the_later_is_refused_and_the_other_untouched() -> None:
    async with bench() as made:
        jobs = [await made.gateway.prepare(Ask(prompts=("a",), request_id="mine")) for _ in range(2)]
        made.workers.hold = True
        reading = asyncio.create_task(_pieces(made, jobs[0]))
        await until(lambda: bool(made.workers.running))
        with pytest.raises(RequestFailed, match="request_id: is that of a running request"):
            await _pieces(made, jobs[1])
        made.workers.go.set()
        assert "".join(piece.text for piece in await reading) == "Hello, world"
        assert (await _text(made, Ask(prompts=("a",), request_id="mine")))[0] == "Hello, world"


async def test_an_id_that_a_client_uses_again_brings_no_news_of_the_request_before() -> None:
    async with bench() as made:
        made.workers.hold = True
        ask, decode = Ask(prompts=("a",), request_id="mine"), made.router.infos[1].ref
        async with aclosing(made.gateway.answer(await made.gateway.prepare(ask), 0)) as pieces:
            assert (await anext(pieces)).text == "H"
        (before,) = (request.request_id for request in made.router.placed)
        reading = asyncio.create_task(_pieces(made, await made.gateway.prepare(ask)))
        await until(lambda: len(made.router.placed) == 2)
        made.workers.deliver(decode, Delta(before, 1, (Token(33),), FinishReason.ABORT))
        made.workers.go.set()
        assert "".join(piece.text for piece in await reading) == "Hello, world"
        assert made.router.suspects == []


async def test_beyond_the_limit_new_answers_have_no_room() -> None:
    async with bench(max_streams=2) as made:
        made.workers.hold = True
        jobs = [await made.gateway.prepare(_ask()) for _ in range(3)]
        reading = [asyncio.create_task(_pieces(made, job)) for job in jobs[:2]]
        await until(lambda: len(made.workers.running) == 2)
        with pytest.raises(RequestFailed) as late:
            await _pieces(made, jobs[2])
        with pytest.raises(RequestFailed) as early:
            await made.gateway.prepare(_ask())
        assert (late.value.code, early.value.code) == (Code.NO_ROOM, Code.NO_ROOM)
        made.workers.go.set()
        await asyncio.gather(*reading)
        assert (await _text(made, _ask()))[0] == "Hello, world"


async def test_draining_lets_answers_end_and_refuses_new_ones() -> None:
    async with bench() as made:
        made.workers.hold = True
        assert await made.gateway.not_ready() == ""
        reading = asyncio.create_task(_pieces(made, await made.gateway.prepare(_ask())))
        await until(lambda: "r0" in made.workers.running)
        draining = asyncio.create_task(made.gateway.drain(5.0))
        await until(lambda: made.gateway._draining)
        assert await made.gateway.not_ready() == "draining"
        with pytest.raises(RequestFailed) as caught:
            await made.gateway.prepare(_ask())
        assert caught.value.code is Code.UNAVAILABLE
        made.workers.go.set()
        assert await draining is True
        assert "".join(piece.text for piece in await reading) == "Hello, world"


async def test_a_router_that_does_not_answer_is_a_reason_not_to_be_ready() -> None:
    class Silent(ScriptedRouter):
        async def workers(self) -> tuple[Any, ...]:
            await asyncio.Event().wait()
            raise AssertionError

        async def not_ready(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    async with bench(router=Silent(), router_timeout_s=0.05) as made:
        assert await made.gateway.not_ready() == "the router does not answer"
        refusal = await _refusal(made, _ask())
        assert (refusal.code, refusal.message) == (Code.UNAVAILABLE, "the router does not answer; try again soon")


async def test_the_gateway_is_as_ready_as_the_router_says() -> None:
    class NoPrefill(ScriptedRouter):
        async def not_ready(self) -> str:
            return "no prefill worker is ready (prefill-0 is starting)"

    async with bench(router=NoPrefill()) as made:
        assert "prefill-0 is starting" in await made.gateway.not_ready()
