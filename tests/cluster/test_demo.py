"""The demo says that it failed when it did: wrong, late, missing, or moved over something else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.demo import LATE_S, Seen, percentile, problems, table_of
from cluster.demo_prompts import CAPITAL, PROMPTS, expedition_log
from tandem.client import Piece, ServedBy, Usage

SERVED = ServedBy(prefill_worker="prefill-0", decode_worker="decode-0", transport="ucx", kv_bytes=1_105_920)


def _seen(text: str = "It is Paris.", *, at_s: float = 1.0, finish: str = "stop", served_by: ServedBy = SERVED) -> Seen:
    seen = Seen(CAPITAL)
    seen.take(Piece(request_id="r", text=text, token_ids=(1, 2)), at_s)
    seen.take(Piece(request_id="r", finish_reason=finish, usage=Usage(37, 2, 16), served_by=served_by), at_s)
    return seen


def test_a_right_answer_over_ucx_is_no_problem() -> None:
    assert problems([_seen()]) == []


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (_seen("It is Lyon."), "does not hold 'Paris'"),
        (_seen(" "), "missing"),
        (_seen(finish="abort"), "missing"),
        (Seen(CAPITAL), "missing"),
        (Seen(CAPITAL, error="UNAVAILABLE: gone"), "gone"),
        (_seen(at_s=LATE_S + 1), "more than 60 s"),
        (_seen(served_by=ServedBy(decode_worker="d", transport="tcp", kv_bytes=1)), "over tcp, not ucx"),
    ],
)
def test_each_failure_is_named(seen: Seen, why: str) -> None:
    assert any(why in problem for problem in problems([_seen(), seen]))


def test_a_demo_in_which_no_kv_moved_has_failed() -> None:
    assert problems([_seen(served_by=ServedBy(decode_worker="decode-0"))]) == [
        "no KV cache moved from a prefill to a decode worker"
    ]


def test_the_table_has_a_row_for_each_request_and_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of([_seen(), Seen(PROMPTS[1])]))
    shown = console.export_text()
    assert "prefill-0→decode-0" in shown
    assert "1.1 MB" in shown
    assert "…" not in shown


def test_the_prompts_are_mixed_and_share_a_system_prompt() -> None:
    assert len(PROMPTS) >= 12
    assert len(expedition_log().split()) > 1_000
    systems = [prompt.messages[0][1] for prompt in PROMPTS if prompt.messages[0][0] == "system"]
    assert len(systems) >= 3
    assert len(set(systems)) == 1


def test_percentiles_of_few_values() -> None:
    assert percentile([], 99) is None
    assert percentile([2.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
