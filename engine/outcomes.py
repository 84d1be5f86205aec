"""What a step's logits mean for each of its chunks: the next token, the prompt's log-probabilities, or an error."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampler import SampleRow, greedy, prompt_logprobs, sample
from engine.scheduler import Outcome
from engine.sequence import Sequence
from engine.types import Chunk, Token


def outcomes_of(chunks: Seq[Chunk], sequences: Seq[Sequence], logits: Tensor, eos: tuple[int, ...]) -> list[Outcome]:
    """One `Outcome` per chunk. `logits` is float32 (sum of chunk.rows, vocab), `sequences` are the chunks' own.

    Only a chunk that reaches its sequence's end samples, from its last row; that row not finite is an error.
    """
    last_rows = _last_rows(chunks)
    ends = [i for i, seq in enumerate(sequences) if chunks[i].start + len(chunks[i].token_ids) == len(seq.tokens)]
    rows = logits if len(ends) == len(logits) else logits[[last_rows[i] for i in ends]]
    sampled = dict(zip(ends, _sampled(rows, [sequences[i] for i in ends], eos), strict=True))
    return [
        Outcome(
            sampled.get(i),
            _prompt_told(chunk, seq, logits, last_rows[i]) if chunk.logits == "all" else (),
            "the model's logits are not finite" if i in sampled and sampled[i] is None else "",
        )
        for i, (chunk, seq) in enumerate(zip(chunks, sequences, strict=True))
    ]


def _sampled(logits: Tensor, sequences: Seq[Sequence], eos: tuple[int, ...]) -> list[Token | None]:
    if not sequences:
        return []
    if all(seq.plain_greedy and seq.generated >= seq.request.sampling.min_tokens for seq in sequences):
        return [None if token is None else Token(token) for token in greedy(logits)]
    return sample(logits, [_sample_row(seq, eos) for seq in sequences])


def _sample_row(seq: Sequence, eos: tuple[int, ...]) -> SampleRow:
    sampling = seq.request.sampling
    forbidden: tuple[int, ...] = ()
    if seq.generated < sampling.min_tokens:
        forbidden = (*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids)
    return SampleRow(sampling, seq.request.sequence_index, len(seq.tokens), seq.counts, forbidden)


def _last_rows(chunks: Seq[Chunk]) -> list[int]:
    """For each chunk the index of its last row of logits; meaningless where it has none."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.rows
        rows.append(end - 1)
    return rows


def _prompt_told(chunk: Chunk, seq: Sequence, logits: Tensor, last_row: int) -> tuple[Token, ...]:
    """Log-probabilities of the prompt's tokens at start + 1 …, which this chunk's rows predict."""
    followers = seq.tokens[chunk.start + 1 : min(chunk.start + chunk.rows + 1, seq.prompt_len)]
    first_row = last_row + 1 - chunk.rows
    rows = logits[first_row : first_row + len(followers)]
    return prompt_logprobs(rows, followers, seq.request.sampling.prompt_logprobs or 0)
