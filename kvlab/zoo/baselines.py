"""What a model of text must beat: a byte-level n-gram model, and a general compressor, on the same split."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence

import numpy as np


def xz_bits_per_byte(texts: Sequence[str]) -> float:
    """Bits a byte of ``xz -9e`` over the texts laid end to end (one stream, so that later files profit).

    Raises: ValueError where there are no bytes.  Source: the xz file format; Python's lzma.
    """
    data = "".join(texts).encode()
    if not data:
        raise ValueError("texts hold no bytes; bits a byte needs at least one")
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


class KneserNey:
    """A byte-level n-gram model with interpolated, modified Kneser-Ney smoothing.

    Shapes and units: ``order`` bytes an n-gram, 2 to 7; ``texts`` are the training files. Each file begins after
    order - 1 zero bytes, which are never predicted. The lowest order is mixed with the uniform 1/256, so that every
    byte has a probability.

    Raises: ValueError for another order, and where there are no texts.

    Source: Chen and Goodman 1999 (three discounts an order, estimated from counts of counts).
    """

    def __init__(self, texts: Iterable[str], order: int = 5) -> None:
        if not 2 <= order <= 7:
            raise ValueError(f"order is {order}; it must be between 2 and 7")
        self.order = order
        grams = self._grams([text.encode() for text in texts], order)
        if not len(grams):
            raise ValueError("texts hold no bytes; a model needs at least one")
        keys, counts = np.unique(grams, return_counts=True)
        self.levels: list[tuple[np.ndarray, ...]] = []  # from the full order down to single bytes
        for n in range(order, 0, -1):
            self.levels.append(self._level(keys, counts))
            # One order down, a gram counts once for each distinct byte seen before it.
            keys, counts = np.unique(keys & ((1 << 8 * (n - 1)) - 1), return_counts=True)

    @staticmethod
    def _grams(files: Sequence[bytes], order: int) -> np.ndarray:
        """Every n-gram that ends in a byte of a file, packed into an integer, the last byte lowest."""
        lead = bytes(order - 1)
        data = np.frombuffer(b"".join(lead + file for file in files), dtype=np.uint8)
        predicted = np.ones(len(data), dtype=bool)
        ends = np.cumsum([len(lead) + len(file) for file in files], dtype=np.int64)
        for end, file in zip(ends, files, strict=True):
            predicted[end - len(file) - len(lead) : end - len(file)] = False
        grams = np.zeros(max(len(data) - order + 1, 0), dtype=np.int64)
        for i in range(order):
            grams = (grams << 8) | data[i : len(data) - order + 1 + i]
        return grams[predicted[order - 1 :]]

    @staticmethod
    def _level(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        n = [int((counts == i).sum()) for i in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1]) if n[0] else 0.5
        discounts = np.array([0.0] + [(i - (i + 1) * y * n[i] / n[i - 1]) if n[i - 1] else 0.5 * i for i in (1, 2, 3)])
        discounts = np.clip(discounts, 0.05, [0.05, 0.95, 1.95, 2.95])
        discounts[0] = 0.0
        taken = discounts[np.minimum(counts, 3)]
        contexts, first = np.unique(keys >> 8, return_index=True)
        totals = np.add.reduceat(counts, first).astype(np.float64)
        left_over = np.add.reduceat(taken, first) / totals
        return keys, counts - taken, contexts, totals, left_over

    def probabilities(self, text: str | bytes) -> np.ndarray:
        """The probability of each byte of ``text`` after those before it: [bytes] float64. Source: as the class."""
        grams = self._grams([text.encode() if isinstance(text, str) else text], self.order)
        p = np.full(len(grams), 1 / 256)
        for n in range(1, self.order + 1):
            keys, kept, contexts, totals, left_over = self.levels[self.order - n]
            gram = grams & ((1 << 8 * n) - 1)
            at, where = _find(keys, gram), _find(contexts, gram >> 8)
            seen = where >= 0
            own = np.where(at >= 0, kept[at], 0.0) / totals[where]
            p = np.where(seen, own + left_over[where] * p, p)
        return p

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Bits a byte over ``texts``, each from its own start. Source: Shannon 1951."""
        bits = np.concatenate([-np.log2(self.probabilities(text)) for text in texts])
        return float(bits.mean())


def _find(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each wanted value stands in a sorted table, -1 for those absent."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[at] == wanted, at, -1)
