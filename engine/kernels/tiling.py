"""How attention's work is cut for a GPU. Pure numbers, so that they can be judged without one."""

from __future__ import annotations

_RESIDENT = 4
"""Programs of the decode kernel that one processor holds at once, by their shared memory."""
_WAVES = 3
"""Rounds of programs to aim for: so many that one long sequence among short ones does not end last and alone."""
_FEWEST_KEYS = 256
"""Keys a split must have, else its start costs more than its reading."""
_MOST_SPLITS = 128
_TILE_BYTES = 16384
_SMALLEST_DOT = 16
"""Rows and columns that a matrix unit takes at least."""


def split_count(batch: int, kv_heads: int, longest_context: int, processors: int) -> int:
    """Into how many parts the longest context is cut, each for a program of its own (flash-decoding).

    Of the counts that give about three rounds of programs over `processors`, the one whose last round is fullest; of
    equally good ones the smallest.
    """
    programs, places = batch * kv_heads, processors * _RESIDENT
    most = min(_MOST_SPLITS, max(1, -(-longest_context // _FEWEST_KEYS)))
    wanted = min(most, -(-_WAVES * places // programs))

    def fullness(splits: int) -> float:
        rounds = programs * splits / places
        return rounds / -(-programs * splits // places)

    return max(range(wanted, min(2 * wanted, most) + 1), key=lambda splits: (round(fullness(splits), 3), -splits))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def padded(size: int) -> int:
    """A side of a matrix as a matrix unit takes it."""
    return max(_SMALLEST_DOT, power_of_two(size))


def keys_together(head_dim: int, itemsize: int) -> int:
    """Keys per round of a kernel's loop, so that three rounds of keys and values fit into shared memory."""
    return max(_SMALLEST_DOT, min(64, _TILE_BYTES // (padded(head_dim) * itemsize)))


def rows_together(longest_chunk: int, group: int, head_dim: int, itemsize: int) -> int:
    """Rows (tokens times the query heads of one KV head) of a prompt's tile."""
    most = 128 if head_dim <= 128 and itemsize <= 2 else 64
    return max(padded(group), min(most, padded(longest_chunk * group)))
