"""The engine as a whole, on a model whose output is a hash of what it read back through the block tables."""

from __future__ import annotations

import pytest
from fakes import expected, make_engine, make_request, prompt_of, run_all


@pytest.mark.parametrize("budget", [16, 64, 4096])
@pytest.mark.parametrize("chunked", [True, False])
def test_output_is_the_models_whatever_the_chunks(budget: int, chunked: bool) -> None:
    engine = make_engine(max_num_batched_tokens=budget, chunked_prefill=chunked)
    requests = [make_request(prompt_of(length, length), max_tokens=20) for length in (1, 15, 16, 17, 48, 100)]
    story = run_all(engine, *requests)
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 20)
        assert story.last(request.request_id).finish == "length"
    assert engine.load(0.0).live_blocks == 0
