"""What a step's logits mean for each of its chunks: the next token, the prompt's log-probabilities, or an error."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from engine.beams import candidates_kept
from engine.sampler import SampleRow, greedy, likeliest, prompt_logprobs, sample
from engine.scheduler import Outcome
from engine.sequence import Sequence
from engine.types import Chunk, Token


def outcomes_of(chunks: Seq[Chunk], sequences: Seq[Sequence], logits: Tensor, eos: tuple[int, ...]) -> list[Outcome]:
    """One `Outcome` per chunk. `logits` is float32 (sum of chunk.rows, vocab), `sequences` are the chunks' own.

    Only a chunk that reaches its sequence's end samples, from its last row; that row not finite is an error.
    """
    last_rows = _last_rows(chunks)
    ends = [i for i, seq in enumerate(sequences) if chunks[i].start + len(chunks[i].token_ids) == len(seq.tokens)]
    several = {i for i in ends if _branching(sequences[i])}
    plain = [i for i in ends if i not in several]
    rows = logits if len(plain) == len(logits) else logits[[last_rows[i] for i in plain]]
    sampled = dict(zip(plain, _sampled(rows, [sequences[i] for i in plain], eos), strict=True))
    branched = {i: _alternatives(logits[last_rows[i]], sequences[i], eos) for i in several}
    return [
        Outcome(
            sampled.get(i),
            branched.get(i) or (),
            _prompt_told(chunk, seq, logits, last_rows[i]) if chunk.logits == "all" else (),
            "the model's logits are not finite" if (sampled | branched).get(i, True) is None else "",
        )
        for i, (chunk, seq) in enumerate(zip(chunks, sequences, strict=True))
    ]


def _branching(seq: Sequence) -> bool:
    """Whether its next token is several: beams always, siblings when they part."""
    return seq.family is not None and not seq.done and (seq.family.search is not None or not seq.family.forked)


def _alternatives(row: Tensor, seq: Sequence, eos: tuple[int, ...]) -> tuple[Token, ...] | None:
    """From float32 (vocab,): a beam's likeliest continuations, or one first token for each sibling."""
    family = seq.family
    assert family is not None, f"{seq.name} has no family"
    how = _sample_row(seq, eos)
    if family.search is not None:
        stops = {*seq.request.sampling.stop_token_ids, *(() if seq.request.sampling.ignore_eos else eos)}
        return likeliest(row, candidates_kept(family.size, len(stops)), how.forbidden)
    rows = [replace(how, sequence_index=how.sequence_index + index) for index in range(family.size)]
    tokens = [token for token in sample(row.expand(family.size, -1), rows) if token is not None]
    return tuple(tokens) if len(tokens) == family.size else None


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
    if sampling.logprobs is None and seq.family is not None and seq.family.withheld:
        sampling = replace(sampling, logprobs=0)  # what the best are chosen by
    return SampleRow(sampling, seq.request.sequence_index + seq.index, len(seq.tokens), seq.counts, forbidden)


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
