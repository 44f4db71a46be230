"""Pictures of what the book talks about: caches, tables, tokens, masks, tiles, multiprocessors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab.figures._style import COLORS, EMPTY, INK, figure, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def occupied(ax: Axes, programs: int, places: int, title: str = "") -> None:
    """Draw a GPU's multiprocessors as squares, twelve in a row, those filled that have one of so many programs.

    Raises: ValueError for a negative number of programs, or no place.

    Source: chapter 04.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    if programs < 0 or places < 1:
        raise ValueError(f"programs is {programs} and places {places}; they must be 0 or more, and 1 or more")
    squares = np.full(-(-places // 12) * 12, np.nan)
    squares[:places] = np.arange(places) < programs
    ax.pcolormesh(squares.reshape(-1, 12), cmap=ListedColormap([EMPTY, COLORS[0]]), vmin=0, vmax=1, edgecolors="white")
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
    ax.invert_yaxis()
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)


def cache_map(cache: Any, ax: Axes | None = None) -> Figure:
    """Draw a contiguous cache from its own tables: each row of slots, whose it is, which slots hold a token.

    Shapes and units: ``cache`` is a ``NaiveCache`` (max_num_seqs rows of max_seq_len slots); one square a slot where
    they are few enough to be counted, else bars. Gives the figure.

    Raises: ValueError for a cache that has no rows.

    Source: chapter 01.
    """
    owners = getattr(cache, "_rows", None)
    if owners is None or not hasattr(cache, "max_seq_len"):
        raise ValueError(f"cache is a {type(cache).__name__}; cache_map draws contiguous rows, such as NaiveCache's")
    from matplotlib.patches import Rectangle

    rows, slots = cache.max_num_seqs, cache.max_seq_len
    if ax is None:
        fig, ax = figure(6.8, min(0.9 + 0.34 * rows, 6.0))
    else:
        fig = ax.get_figure(root=True)  # type: ignore[assignment]
    assert ax is not None
    by_row = {row: seq_id for seq_id, row in owners.items()}
    countable = slots <= 64
    for row in range(rows):
        used = cache.length(by_row[row]) if row in by_row else 0
        taken = row in by_row
        spans = (
            [(i, 1, i < used) for i in range(slots)] if countable else [(0, used, True), (used, slots - used, False)]
        )
        for start, width, filled in spans:
            ax.add_patch(
                Rectangle(
                    (start, row - 0.4), width, 0.8, linewidth=0.8 if countable else 0.4, edgecolor="white",
                    facecolor=COLORS[0] if filled else (COLORS[5] if taken else EMPTY),
                    alpha=1.0 if filled or not taken else 0.45, hatch="///" if taken and not filled else None,
                )
            )  # fmt: skip
    labels = [f"row {r}: " + (f"sequence {by_row[r]}" if r in by_row else "free") for r in range(rows)]
    ax.set_yticks(range(rows), labels, fontsize=8 if rows <= 20 else 6)
    ax.set(xlim=(0, slots), ylim=(rows - 0.4, -0.6), xlabel="slot")
    ax.grid(False)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=COLORS[0], label="holds a token"),
        Rectangle(
            (0, 0), 1, 1, facecolor=COLORS[5], alpha=0.45, hatch="///", edgecolor="white", label="reserved, empty"
        ),
        Rectangle((0, 0), 1, 1, facecolor=EMPTY, label="free"),
    ]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return fig


def block_tables(ax: Axes, manager: Any, words: Mapping[int, Sequence[Any]], title: str = "") -> None:
    """Draw a pool block by block, with what each slot holds, and beside it the table of each sequence.

    Shapes and units: ``manager`` is a ``paged.BlockManager`` of few small blocks; ``words`` gives, for each sequence, a
    word for each of its tokens. Blocks in several tables are orange, in one blue, free ones grey.

    Raises: ValueError where a sequence has not a word a token.

    Source: chapter 02.
    """
    from matplotlib.patches import Rectangle

    pool, size = manager.pool, manager.block_size
    text: dict[tuple[int, int], str] = {}
    for seq_id in manager.seq_ids:
        if len(words.get(seq_id, ())) != manager.length(seq_id):
            raise ValueError(f"sequence {seq_id} has {manager.length(seq_id)} tokens; words has another number")
        for i, word in enumerate(words[seq_id]):
            text[manager.table(seq_id)[i // size], i % size] = str(word)
    for block in range(pool.num_blocks):
        owners = pool.ref_count(block)
        color = EMPTY if owners == 0 else COLORS[1] if owners > 1 else COLORS[0]
        for slot in range(size):
            at = (block * (size + 0.5) + slot, 0)
            ax.add_patch(Rectangle(at, 1, 1, facecolor=color, alpha=0.4, edgecolor="white"))
            ax.text(at[0] + 0.5, 0.5, text.get((block, slot), ""), ha="center", va="center", fontsize=8)
        ax.text(block * (size + 0.5) + size / 2, -0.35, str(block), ha="center", va="center", fontsize=8)
    tables = [f"sequence {s}: {manager.table(s).tolist()}, {manager.length(s)} tokens" for s in manager.seq_ids]
    for row, line in enumerate(reversed(tables)):
        ax.text(0, 1.45 + 0.5 * row, line, fontsize=8.5, va="center")
    ax.set(xlim=(-0.3, pool.num_blocks * (size + 0.5)), ylim=(-0.7, 1.6 + 0.5 * max(len(tables), 1)))
    ax.set_title(title)
    ax.set_axis_off()


def memory_map(ax: Axes, states: Sequence[Any], title: str = "") -> None:
    """Draw what each slot of a memory was at each snapshot: free, reserved and empty, or filled.

    Shapes and units: ``states`` are arrays [slots] of 0, 1 and 2 (``workloads.Run.states``); time runs to the right.

    Raises: ValueError where there are no states.

    Source: chapter 02.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    if len(states) == 0:
        raise ValueError("states is empty; take snapshots while serving")
    picture = np.stack(states, axis=1)
    rows = np.unique(np.linspace(0, len(picture) - 1, min(len(picture), 499)).astype(int))  # a pixel is one slot
    ax.imshow(
        picture[rows], aspect="auto", cmap=ListedColormap([EMPTY, COLORS[1], COLORS[0]]), vmin=0, vmax=2,
        interpolation="nearest", extent=(0, len(states), len(picture), 0),
    )  # fmt: skip
    ax.set(title=title, xlabel="snapshot", ylabel="slot")
    ax.grid(False)


def token_boxes(
    ax: Axes,
    rows: Mapping[str, Sequence[Any]],
    *,
    groups: Mapping[str, Sequence[Any]] | None = None,
    start: int = 0,
) -> None:
    """Draw small rows of labelled boxes, for pictures that can be checked by hand; ``None`` is an empty box.

    Shapes and units: a row is a list of what its boxes say, the first at position ``start``; ``groups`` may give, for
    a row, a list as long that says which boxes share a colour (the page, the sequence, the kind).

    Raises: ValueError where a row's groups have another length.

    Source: chapter 01.
    """
    from matplotlib.patches import Rectangle

    groups = groups or {}
    colors: dict[Any, str] = {}
    for y, (name, boxes) in enumerate(rows.items()):
        kinds = groups.get(name, [0] * len(boxes))
        if len(kinds) != len(boxes):
            raise ValueError(f"groups of row {name!r} has {len(kinds)} entries; the row has {len(boxes)}")
        for x, (text, kind) in enumerate(zip(boxes, kinds, strict=True)):
            color = EMPTY if text is None else colors.setdefault(kind, COLORS[len(colors) % len(COLORS)])
            ax.add_patch(
                Rectangle(
                    (start + x - 0.45, y - 0.4), 0.9, 0.8, facecolor=color, alpha=0.35, edgecolor=INK, linewidth=0.6
                )
            )
            ax.text(start + x, y, "" if text is None else str(text), ha="center", va="center", fontsize=9)
    longest = max(map(len, rows.values()), default=0)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(
        xlim=(start - 0.6, start + longest - 0.4), ylim=(len(rows) - 0.4, -0.6), xticks=range(start, start + longest)
    )
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)


def visible(ax: Axes, seen: Any, title: str) -> None:
    """Draw which keys (columns) each query (row) of a pass sees; the queries are the last of the keys' tokens.

    Keys that were there before the pass, and so come from a cache, are orange; those of the pass itself are blue.

    Shapes and units: ``seen`` bool [q_len, kv_len], a tensor or an array.

    Raises: ValueError where ``seen`` has not two dimensions.

    Source: chapter 01.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    grid = np.asarray(seen, dtype=bool)
    if grid.ndim != 2:
        raise ValueError(f"seen has shape {grid.shape}; it must be [q_len, kv_len]")
    rows, columns = grid.shape
    past = max(columns - rows, 0)
    for i, j in np.argwhere(grid):
        color = COLORS[1] if j < past else COLORS[0]
        ax.add_patch(Rectangle((j - 0.45, i - 0.45), 0.9, 0.9, facecolor=color, alpha=0.55))
        ax.text(j, i, "•", ha="center", va="center")
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal")
    ax.set(title=title, xlabel="key of token", ylabel="query of token")
    ax.set_xticks(range(columns))
    ax.set_yticks(range(rows), [str(columns - rows + i) for i in range(rows)])
    ax.grid(False)


def tiles(ax: Axes, q_len: int, kv_len: int, M: int, N: int, title: str = "") -> None:
    """Draw a causal pass cut into tiles of M queries and N keys: clear ones blue, edges orange, skipped ones grey.

    Shapes and units: as ``reference.tile_kinds``; a dot is a pair of a query and a key it sees.

    Raises: as ``reference.tile_kinds``.

    Source: chapter 03.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    from kvlab import reference

    kinds, seen = reference.tile_kinds(q_len, kv_len, M, N), reference.visible_keys(q_len, kv_len)
    ax.imshow(
        kinds, cmap=ListedColormap([EMPTY, COLORS[1], COLORS[0]]), vmin=0, vmax=2, alpha=0.6, aspect="auto",
        extent=(0, kinds.shape[1] * N, kinds.shape[0] * M, 0),
    )  # fmt: skip
    ax.plot(*(np.argwhere(seen.numpy()).T[::-1] + 0.5), ".", color=INK, ms=2)
    ax.set(title=title, xlabel="key", ylabel="query", xlim=(0, kv_len), ylim=(q_len, 0), yticks=range(0, q_len, M))
    ax.grid(False)


def memory_maps(runs: Mapping[str, Sequence[Any]], *, alt: str, caption: str = "") -> None:
    """Draw ``memory_map`` of several runs side by side, a title each, and show them.

    Shapes and units: ``runs`` maps a title to its snapshots, as ``memory_map`` takes them.

    Raises: ValueError where there are no runs, one has no states, or ``alt`` is empty.

    Source: chapter 02.
    """
    if not runs:
        raise ValueError("runs is empty; it must hold the states of one run or more")
    fig, axes = figure(3.2 * len(runs), 3.2, columns=len(runs))
    for ax, (title, states) in zip([axes] if len(runs) == 1 else axes, runs.items(), strict=True):
        memory_map(ax, states, title)
    show(fig, alt=alt, caption=caption)
