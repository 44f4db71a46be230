"""The shape of a proposal: a chain of tokens, or a tree of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.batch import as_int, as_ints

MAX_DRAFT_TOKENS = 62
"""Drafts of one sequence at most: a tree mask has 63 bits, and the token that the tree hangs on takes one."""


@dataclass(frozen=True)
class Tree:
    """Draft tokens as nodes, each below the node whose token it follows; siblings are tried in the order of the nodes.

    The root is no node: it is the newest token of the text, which is known and not yet in the cache.

    Shapes and units: ``parents[i]`` is the node that node i follows, -1 for the root, and always under i.

    Raises: ValueError for a parent that does not stand before its node, or more than 62 nodes.

    Source: chapter 05; Miao et al. 2023 (SpecInfer), Cai et al. 2024 (Medusa).
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        parents = as_ints(self.parents, "parents")
        if len(parents) > MAX_DRAFT_TOKENS:
            raise ValueError(f"parents has {len(parents)} nodes; a tree of drafts holds {MAX_DRAFT_TOKENS} at most")
        for i, parent in enumerate(parents):
            if not -1 <= parent < i:
                raise ValueError(f"parents[{i}] is {parent}; it must be a node before {i}, or -1 for the root")
        object.__setattr__(self, "parents", tuple(parents))

    @classmethod
    def chain(cls, length: int) -> Tree:
        """``length`` tokens, each after the one before.

        Raises: ValueError for a length that is no integer, 0 to 62.  Source: chapter 05.
        """
        length = as_int(length, "length")
        if not 0 <= length <= MAX_DRAFT_TOKENS:
            raise ValueError(f"length is {length}; it must be 0 to {MAX_DRAFT_TOKENS} tokens")
        return cls(tuple(range(-1, length - 1)))

    @classmethod
    def branching(cls, widths: Sequence[int]) -> Tree:
        """A tree in which every node of depth j has ``widths[j]`` children, laid out level by level.

        Raises: ValueError for a width under 1, or more than 62 nodes.  Source: chapter 05; Chen et al. 2024 (Sequoia).
        """
        widths = as_ints(widths, "widths")
        if any(width < 1 for width in widths):
            raise ValueError(f"widths are {widths}; each must be 1 or more")
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            if first + len(level) * width > MAX_DRAFT_TOKENS:
                raise ValueError(f"widths are {widths}; a tree of drafts holds {MAX_DRAFT_TOKENS} nodes at most")
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_ranks(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """The smallest tree that holds these paths, each the ranks of its tokens among their siblings (0 the first).

        Raises: ValueError where a rank is under 0 or lacks the one before it, a path is no list of integers or has
        more than 62, or as ``Tree``.

        Source: chapter 05; Cai et al. 2024 (Medusa) write their trees so.
        """
        try:
            every = [as_ints(path, f"paths[{n}]") for n, path in enumerate(paths)]
        except TypeError:
            raise ValueError(f"paths is {paths!r}; it must be a list of paths") from None
        if (longest := max(map(len, every), default=0)) > MAX_DRAFT_TOKENS:
            raise ValueError(f"paths hold one of {longest} tokens; it must have {MAX_DRAFT_TOKENS} at most")
        wanted = {tuple(path[:length]) for path in every for length in range(1, len(path) + 1)}
        for path in wanted:
            if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in wanted):
                raise ValueError(
                    f"paths need {list(path)}, whose last rank must be 0 or have the rank before it there too"
                )
        order = sorted(wanted, key=lambda path: (len(path), path))
        place = {(): -1} | {path: i for i, path in enumerate(order)}
        return cls(tuple(place[path[:-1]] for path in order))

    def __len__(self) -> int:
        """The number of draft tokens. Source: chapter 05."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before. Source: chapter 05."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """How many tokens after the root each node stands: 1 or more. Source: chapter 05."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def ranks(self) -> list[int]:
        """How many siblings stand before each node. Source: chapter 05."""
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return ranks

    @property
    def children(self) -> dict[int, list[int]]:
        """The nodes that follow each node that has any, -1 the root, in order. Source: chapter 05."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def masks(self) -> list[int]:
        """One ``tree_mask`` for the root and each node: bit 0 is the root, bit i + 1 node i; ancestors and self set.

        Source: chapter 05; Miao et al. 2023 (the topology-aware mask).
        """
        masks = [1]
        for i, parent in enumerate(self.parents):
            masks.append(masks[parent + 1] | 1 << (i + 1))
        return masks

    def cut(self, length: int) -> Tree:
        """The first ``length`` nodes, all where it is more; a tree too, as parents come first.

        Raises: ValueError for a length that is no integer.  Source: chapter 05.
        """
        return Tree(self.parents[: max(0, as_int(length, "length"))])

    def path(self, node: int) -> list[int]:
        """The nodes from depth 1 down to ``node``; empty for the root, -1.

        Raises: ValueError for a node that the tree does not have.  Source: chapter 05.
        """
        node = as_int(node, "node")
        if not -1 <= node < len(self):
            raise ValueError(f"node is {node}; it must be one of the tree's {len(self)}, or -1 for the root")
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
