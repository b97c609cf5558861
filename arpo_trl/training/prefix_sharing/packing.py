"""Rows of token ids to packs: prefix trees in depth-first order."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass
class Pack:
    """
    Prefix trees over some rows, with `S` nodes in depth-first order and `N` nodes to score.

    In that order node `k` is an ancestor of node `q`, or `q` itself, if and only if `k <= q < subtree_end[k]`. With
    causal attention and relative positions a node's hidden state depends on these nodes only, and they are the tokens
    that lead up to it in each of its rows: merging the rows is exact.

    Args:
        rows (`list[int]`):
            Indices of the rows.
        input_ids (`np.ndarray` of shape `(S,)`):
            Token of each node.
        position_ids (`np.ndarray` of shape `(S,)`):
            Depth of each node, which is its position in every row it belongs to.
        subtree_end (`np.ndarray` of shape `(S,)`):
            One past the last descendant of each node.
        parents (`np.ndarray` of shape `(N,)`):
            Nodes whose hidden states are scored. A node occurs once for each of its children that is a target.
        labels (`np.ndarray` of shape `(N,)`):
            Token that each of `parents` is scored on.
        target_indices (`list[np.ndarray]`):
            For each of `rows`, the elements of `parents` that score its targets.
    """

    rows: list[int]
    input_ids: np.ndarray
    position_ids: np.ndarray
    subtree_end: np.ndarray
    parents: np.ndarray
    labels: np.ndarray
    target_indices: list[np.ndarray]


def common_prefix_length(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading elements that two one-dimensional arrays share."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def split_rows(sequences: list[np.ndarray], max_tokens: int, min_packs: int = 1) -> list[list[int]]:
    """
    Divide the rows of a batch into packs of at most `max_tokens` distinct tokens.

    A pack that is too large is cut where two neighbouring rows share the fewest tokens, that is between subtrees and
    never within a row. A row longer than `max_tokens` is a pack of its own.

    Args:
        sequences (`list[np.ndarray]`):
            Token ids of every row, without padding.
        max_tokens (`int`):
            Largest number of distinct tokens in a pack.
        min_packs (`int`, *optional*, defaults to `1`):
            Least number of packs, as far as there are rows.

    Returns:
        `list[list[int]]`: For each pack its rows, in lexicographic order of their token ids.
    """
    # Big-endian bytes sort like the ids themselves
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].astype(">u4").tobytes())
    shared = [common_prefix_length(sequences[a], sequences[b]) for a, b in pairwise(order)]

    def num_tokens(span: tuple[int, int]) -> int:
        start, end = span
        return sum(len(sequences[row]) for row in order[start:end]) - sum(shared[start : end - 1])

    spans = [(0, len(order))]
    while True:
        divisible = [span for span in spans if span[1] - span[0] > 1]
        largest = max(divisible, key=num_tokens, default=None)
        if largest is None or (num_tokens(largest) <= max_tokens and len(spans) >= min_packs):
            return [order[start:end] for start, end in spans]
        start, end = largest
        cut = min(range(start + 1, end), key=lambda i: (shared[i - 1], abs(2 * i - start - end)))
        index = spans.index(largest)
        spans[index : index + 1] = [(start, cut), (cut, end)]


def build_pack(sequences: list[np.ndarray], num_targets: list[int], rows: list[int]) -> Pack:
    """
    Merge rows into prefix trees.

    Args:
        sequences (`list[np.ndarray]`):
            Token ids of every row of the batch, without padding.
        num_targets (`list[int]`):
            For every row of the batch, how many of its last tokens are scored; less than its length.
        rows (`list[int]`):
            Rows to merge, in lexicographic order of their token ids, so that rows with a common prefix are neighbours.

    Returns:
        [`Pack`]
    """
    max_nodes = sum(len(sequences[row]) for row in rows)
    input_ids, position_ids, subtree_end, parents = np.zeros((4, max_nodes), dtype=np.int64)
    targets = []
    previous = path = np.empty(0, dtype=np.int64)
    size = 0
    for row in rows:
        sequence = sequences[row]
        shared = common_prefix_length(previous, sequence)
        subtree_end[path[shared:]] = size
        # The row's nodes: those it shares with the row before it, then new ones
        path = np.concatenate([path[:shared], np.arange(size, size + len(sequence) - shared)])
        input_ids[path], position_ids[path] = sequence, np.arange(len(sequence))
        parents[path[1:]] = path[:-1]
        targets.append(path[len(path) - num_targets[row] :])
        size += len(sequence) - shared
        previous = sequence
    subtree_end[path] = size

    scored = np.unique(np.concatenate(targets))
    if len(scored) == 0:
        scored = np.zeros(1, dtype=np.int64)  # keeps the pack connected to the graph; no row reads it
    return Pack(
        rows=rows,
        input_ids=input_ids[:size],
        position_ids=position_ids[:size],
        subtree_end=subtree_end[:size],
        parents=parents[scored],
        labels=input_ids[scored],
        target_indices=[np.searchsorted(scored, nodes) for nodes in targets],
    )
