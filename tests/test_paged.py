"""Pages: the books never lose or double a block, kernels equal the gathered oracle, beams share what they share."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvlab import config as configs
from kvlab import paged, runtime, testing, workloads, zoo
from kvlab.batch import Batch
from kvlab.generate import generate
from kvlab.naive import NaiveCache
from kvlab.paged import BlockManager, BlockPool, OutOfBlocks, PagedCache
from kvlab.sampling import SamplingParams

ON = runtime.device()
KERNEL = {"impl": "triton"}
# The interpreter is slow, and NaN in an unused slot shows all that another number would.
CHECKED = KERNEL | ({} if runtime.HAS_GPU else {"fills": (float("nan"),)})
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


def make_paged(config, max_num_seqs, max_seq_len, *, block_size=4, **options):
    """A PagedCache with room for so many sequences, as ``run_cache_case`` makes its caches."""
    return PagedCache(config, max_num_seqs * -(-max_seq_len // block_size), block_size, **options)


# --- the pool ------------------------------------------------------------------------------------------------------


def test_blocks_come_back_in_the_order_they_were_freed_and_tails_before_heads():
    pool = BlockPool(6, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([0, 1])
    pool.free([3])
    assert pool.free_order() == [4, 5, 1, 0, 3]
    assert pool.allocate(3) == [4, 5, 1]


def test_double_free_raises_and_changes_nothing():  # P5
    manager = BlockManager(BlockPool(4, 1))
    pool = manager.pool
    blocks = pool.allocate(2)
    pool.share([0])
    manager._tables[7], manager._lengths[7] = type(manager.table(0))("i", [0, 1, 0]), 3
    manager.fork(7, 8)
    assert [pool.ref_count(b) for b in blocks] == [4, 2]
    manager.free(7)
    manager.free(8)
    assert (pool.num_free, sorted(pool.free_order())) == (4, [0, 1, 2, 3])
    [b] = pool.allocate()
    pool.share([b])
    pool.free([b, b])
    for bad in ([b], [b, b], [-1], [4], [1.5], [True]):
        before = pool.free_order(), [pool.ref_count(i) for i in range(4)]
        with pytest.raises(ValueError, match="block"):
            pool.free(bad)
        assert (pool.free_order(), [pool.ref_count(i) for i in range(4)]) == before
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([held[0], held[1], held[1]])
    assert [pool.ref_count(i) for i in held] == [1, 1]


@pytest.mark.parametrize("bad", [[0, 5], [-1], [9], ["a"], [2.0]])
def test_only_held_blocks_are_shared(bad):
    pool = BlockPool(6, 4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="block"):
        pool.share(bad)
    assert [pool.ref_count(b) for b in range(6)] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_has_blocks_and_blocks_have_slots(blocks, size):
    with pytest.raises(ValueError, match="1 or more"):
        BlockPool(blocks, size)


def test_a_refusal_says_what_is_needed_and_changes_nothing():
    pool = BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks) as refused:
        pool.allocate(2)
    assert (refused.value.needed, refused.value.free) == (2, 1)
    with pytest.raises(ValueError, match="count is -1"):
        pool.allocate(-1)
    assert pool.free_order() == [2]


def test_order_is_kept_over_many_rounds():
    """Against a plain deque, far beyond the point where the pool cuts off what it handed out."""
    pool, plain, rng = BlockPool(13, 4), list(range(13)), random.Random(0)
    held: list[list[int]] = []
    for _ in range(600):
        if held and (rng.random() < 0.5 or not plain):
            blocks = held.pop(rng.randrange(len(held)))
            pool.free(blocks)
            plain += blocks[::-1]
        else:
            count = rng.randint(0, min(4, len(plain)))
            blocks = pool.allocate(count)
            assert blocks == plain[:count]
            del plain[:count]
            held.append(blocks)
        assert pool.free_order() == plain


# --- the manager ---------------------------------------------------------------------------------------------------


def test_needed_blocks():  # P8
    for length, more, needed, fits in ((4, 1, 1, True), (3, 1, 0, True), (3, 6, 2, False)):
        manager = BlockManager(BlockPool(2, 4))
        manager.ensure(0, length)
        manager.advance(0, length)
        assert manager.blocks_needed({0: length + more}) == needed
        assert manager.can_ensure(0, length + more) is fits


def test_a_refused_allocation_leaks_nothing():  # P6
    manager = BlockManager(BlockPool(5, 4))
    manager.ensure(0, 12)
    manager.advance(0, 12)
    manager.adopt(1, list(manager.table(0)))
    manager.free(1)
    order = manager.pool.free_order()
    with pytest.raises(OutOfBlocks) as refused:
        manager.ensure_all({1: 8, 2: 4})
    assert (refused.value.needed, refused.value.free) == (3, 2)
    assert manager.seq_ids == [0]
    assert [manager.pool.ref_count(b) for b in manager.table(0)] == [1, 1, 1]
    assert manager.pool.free_order() == order
    manager.audit()


def test_ensure_is_room_and_advance_is_tokens():
    manager = BlockManager(BlockPool(4, 4))
    for _ in range(3):
        manager.ensure(0, 6)
    assert (len(manager.table(0)), manager.length(0), manager.pool.num_free) == (2, 0, 2)
    manager.advance(0, 6)
    manager.ensure(0, 3)  # there is room for 3 already
    assert manager.length(0) == 6
    for bad in (5, 9, -1):
        with pytest.raises(ValueError, match="advance"):
            manager.advance(0, bad)
    for bad in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="length"):
            manager.ensure(0, bad)
    for bad in (None, "a", 1.0, True):
        with pytest.raises(ValueError, match="seq_id"):
            manager.ensure(bad, 1)
    assert manager.seq_ids == [0]
    manager.audit()


def copy_on_write(prompt_len):
    """Fork a sequence of a block size of 4 and let both write one token; gives the manager and the copies."""
    manager = BlockManager(BlockPool(8, 4))
    manager.ensure(0, prompt_len)
    manager.advance(0, prompt_len)
    manager.fork(0, 1)
    manager.ensure_all({0: prompt_len + 1, 1: prompt_len + 1})
    manager.audit()
    return manager, manager.take_copies()


def test_siblings_do_not_read_each_others_tokens():  # P4
    manager, copies = copy_on_write(6)
    refs = manager.pool.ref_count
    assert manager.table(0)[0] == manager.table(1)[0]
    assert refs(manager.table(0)[0]) == 2
    assert manager.table(0)[1] != manager.table(1)[1]
    assert copies == {manager.table(0)[1]: manager.table(1)[1]}  # the first writer copies, the last owner stays
    manager, copies = copy_on_write(8)
    assert copies == {}
    assert [manager.pool.ref_count(b) for b in manager.table(0)] == [2, 2, 1]
    assert manager.table(0)[2] != manager.table(1)[2]


def test_a_copy_of_a_copy_is_read_at_its_source():
    manager = BlockManager(BlockPool(8, 4))
    manager.ensure(0, 2)
    manager.advance(0, 2)
    source = manager.table(0)[0]
    manager.fork(0, 1)
    manager.ensure(1, 3)
    manager.fork(1, 2)
    manager.ensure(2, 3)
    assert manager.take_copies() == {manager.table(1)[0]: source, manager.table(2)[0]: source}
    manager.fork(0, 3)
    manager.ensure(3, 3)
    manager.free(3)
    assert manager.take_copies() == {}  # a copy nobody needs any more is forgotten
    manager.audit()


def test_adopted_blocks_are_shared_and_their_length_fits():
    manager = BlockManager(BlockPool(6, 4))
    manager.ensure(0, 8)
    manager.advance(0, 8)
    manager.adopt(1, list(manager.table(0)))
    assert manager.length(1) == 8
    for blocks, length in (([0], 5), ([0, 1], 4), ([0], -1)):
        with pytest.raises(ValueError, match="length"):
            manager.adopt(2, blocks, length)
    for seq_id, blocks in ((1, [0]), (2, [5]), (2, [6])):
        with pytest.raises(ValueError):
            manager.adopt(seq_id, blocks)
    manager.audit()
    assert manager.seq_ids == [0, 1]


def test_slots_of_tokens():
    manager = BlockManager(BlockPool(8, 4))
    manager.pool.allocate(3)
    manager.ensure(5, 6)
    assert manager.slots(5, 2, 6) == [14, 15, 16, 17]
    for start, stop in ((-1, 2), (3, 2), (0, 9)):
        with pytest.raises(ValueError, match="slots"):
            manager.slots(5, start, stop)
    with pytest.raises(ValueError, match="not in the cache"):
        manager.slots(9, 0, 1)


def test_the_audit_notices():
    def spoilt(harm):
        manager = BlockManager(BlockPool(6, 4))
        manager.ensure(0, 6)
        manager.advance(0, 6)
        harm(manager)
        with pytest.raises(AssertionError):
            manager.audit()

    spoilt(lambda m: m.pool._free.append(0))
    spoilt(lambda m: m.pool._free.append(3))
    spoilt(lambda m: m.pool._refs.__setitem__(0, 2))
    spoilt(lambda m: m.pool._free.pop())
    spoilt(lambda m: m._tables[0].append(4))
    spoilt(lambda m: m._lengths.__setitem__(0, 9))
    spoilt(lambda m: m._lengths.__setitem__(1, 0))


class Books(RuleBasedStateMachine):
    """Any history of fork, append, truncate and free, beside plain lists of token names in named slots."""

    ids = Bundle("ids")

    @initialize(size=st.integers(1, 5), blocks=st.integers(1, 12))
    def start(self, size, blocks):
        self.manager = BlockManager(BlockPool(blocks, size))
        self.memory = {}  # flat slot -> token name
        self.texts = {}
        self.names = itertools.count()
        self.fresh = itertools.count()

    def write(self, lengths):
        """Append to several sequences at once, as a pass does; a refusal must leave everything as it was."""
        before = {s: list(self.manager.table(s)) for s in self.texts}, self.manager.pool.free_order()
        try:
            self.manager.ensure_all(lengths)
        except OutOfBlocks as refused:
            counts = refused.needed, refused.free
        else:
            counts = None
        if counts is not None:
            assert counts[0] > counts[1] == self.manager.pool.num_free
            assert ({s: list(self.manager.table(s)) for s in self.texts}, self.manager.pool.free_order()) == before
            return
        size = self.manager.block_size
        copies = self.manager.take_copies()
        moved = {to * size + i: self.memory.get(at * size + i) for to, at in copies.items() for i in range(size)}
        self.memory.update(moved)
        for seq_id, length in lengths.items():
            text = self.texts.setdefault(seq_id, [])
            for slot in self.manager.slots(seq_id, len(text), length):
                text.append(next(self.names))
                self.memory[slot] = text[-1]
            self.manager.advance(seq_id, length)

    @rule(target=ids, count=st.integers(0, 9))
    def create(self, count):
        seq_id = next(self.fresh)
        self.write({seq_id: count})
        return seq_id

    @rule(which=st.lists(ids, unique=True, min_size=1, max_size=3), more=st.integers(0, 7))
    def append(self, which, more):
        self.write({s: len(self.texts[s]) + more for s in which if s in self.texts})

    @rule(target=ids, parent=ids)
    def fork(self, parent):
        child = next(self.fresh)
        if parent in self.texts:
            self.manager.fork(parent, child)
            self.texts[child] = list(self.texts[parent])
        return child

    @rule(seq_id=ids, part=st.floats(0, 1))
    def truncate(self, seq_id, part):
        if seq_id in self.texts:
            kept = round(part * len(self.texts[seq_id]))
            self.manager.truncate(seq_id, kept)
            del self.texts[seq_id][kept:]

    @rule(seq_id=consumes(ids))
    def free(self, seq_id):
        self.manager.free(seq_id)
        self.texts.pop(seq_id, None)

    @invariant()
    def books_balance_and_every_text_is_there(self):
        if not hasattr(self, "manager"):
            return
        self.manager.audit()
        for seq_id, text in self.texts.items():
            assert self.manager.length(seq_id) == len(text)
            assert [self.memory[slot] for slot in self.manager.slots(seq_id, 0, len(text))] == text


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_no_history_gives_a_block_two_places():  # A33
    for seed in range(40):
        for manager in workloads.random_history(seed, steps=40):
            places: dict[int, set[int]] = {}
            for seq_id in manager.seq_ids:
                for place, block in enumerate(manager.table(seq_id)):
                    places.setdefault(block, set()).add(place)
            assert all(len(p) == 1 for p in places.values())


# --- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("case", testing.CACHES, ids=lambda case: case.name)
def test_the_paged_cache_passes(case, block_size):
    if case.name == "full" and block_size != 4:
        pytest.skip("the case counts pages of 4")
    cache = testing.run_cache_case(lambda *a, **k: make_paged(*a, block_size=block_size, **k), case, device=ON)
    cache.manager.audit()


@needs_triton
@pytest.mark.parametrize("case", testing.CACHES[:12], ids=lambda case: case.name)
def test_the_paged_cache_passes_by_its_kernels(case):
    before = runtime.launches["paged_attention_kernel"], runtime.launches["reshape_and_cache_kernel"]
    testing.run_cache_case(lambda *a, **k: make_paged(*a, **k, **KERNEL), case, device=ON)
    assert runtime.launches["paged_attention_kernel"] > before[0]
    assert runtime.launches["reshape_and_cache_kernel"] > before[1]


def test_a_refused_batch_changes_nothing():
    config = testing.CACHES[0].config
    cache = PagedCache(config, 4, 4)
    cache.prepare(Batch.build([0], [[1] * 9], [0]))
    before = list(cache.manager.table(0)), cache.manager.pool.free_order()
    for error, ids, new, past in (
        (OutOfBlocks, [0, 1], [[1] * 4, [1] * 4], [9, 0]),
        (ValueError, [0, 1], [[1], [1]], [9, 2]),
        (ValueError, [1, 0], [[1], [1]], [0, 8]),
    ):
        with pytest.raises(error):
            cache.prepare(Batch.build(ids, new, past))
        assert (list(cache.manager.table(0)), cache.manager.pool.free_order()) == before
        assert cache.manager.seq_ids == [0]
        assert cache.length(0) == 9
    batch = Batch.build([0], [[1]], [9])
    batch.seq_ids, batch.q_lens, batch.past_lens = [0, 0], [1, 1], [9, 9]
    with pytest.raises(ValueError, match="twice"):
        cache.prepare(batch)


@pytest.mark.parametrize("spoil", [{"layer": -1}, {"layer": 2}, {"q": 3}, {"v": None}, {"k": 3}, {"heads": 1}])
def test_attend_refuses_what_does_not_fit(spoil):
    config = testing.CACHES[0].config
    cache = PagedCache(config, 4, 4)
    q = torch.randn(2, config.num_heads, config.head_dim)
    k = torch.randn(2, config.num_kv_heads, config.head_dim)
    with pytest.raises(ValueError, match="before prepare"):
        cache.attend(0, q, k, k)
    cache.prepare(Batch.build([0], [[1, 1]], [0]))
    before = cache.k.clone()
    arguments = {
        "layer": spoil.get("layer", 0), "q": torch.randn(spoil.get("q", 2), *q.shape[1:]),
        "k": torch.randn(spoil.get("k", 2), spoil.get("heads", config.num_kv_heads), config.head_dim),
        "v": spoil.get("v", k),
    }  # fmt: skip
    with pytest.raises(ValueError):
        cache.attend(**arguments)
    assert torch.equal(cache.k.nan_to_num(), before.nan_to_num())


def test_bytes_in_use_count_shared_slots_once():
    config = testing.CACHES[0].config
    cache = PagedCache(config, 8, 4)
    token = cache.nbytes // 32
    cache.prepare(Batch.build([0], [[1] * 6], [0]))
    assert cache.used_nbytes == 6 * token
    cache.fork(0, 1)
    assert cache.used_nbytes == 6 * token
    cache.prepare(Batch.build([1], [[1]], [6]))
    assert cache.used_nbytes == (4 + 2 + 3) * token


def test_a_manager_is_shared_with_a_scheduler():
    config = testing.CACHES[0].config
    manager = BlockManager(BlockPool(8, 4))
    cache = PagedCache(config, 8, 4, manager=manager)
    manager.ensure_all({0: 5, 1: 3})  # a scheduler makes room first; prepare then finds it
    free = manager.pool.num_free
    cache.prepare(Batch.build([0, 1], [[1] * 5, [1] * 3], [0, 0]))
    assert (manager.pool.num_free, cache.length(0), cache.length(1)) == (free, 5, 3)
    with pytest.raises(ValueError, match="manager"):
        PagedCache(config, 9, 4, manager=manager)
    with pytest.raises(ValueError, match="dtype"):
        PagedCache(config, 8, 4, dtype=torch.int32)


def test_buffers_keep_their_address_and_survive_growth():
    config = testing.CACHES[0].config
    cache = PagedCache(config, 400, 1)
    cache.prepare(Batch.build([0], [[1] * 3], [0]))
    addresses = {name: b.device.data_ptr() for name, b in cache._buffers.items()}
    for step in range(5):
        cache.prepare(Batch.build([0], [[1]], [3 + step]))
    assert {name: b.device.data_ptr() for name, b in cache._buffers.items()} == addresses
    cache.prepare(Batch.build([1], [[1] * 300], [0]))
    assert cache._buffers["slots"].device[:300].tolist() == cache.manager.slots(1, 0, 300)


def test_tables_of_one_width_and_a_bound_for_a_captured_pass():
    seen = []

    def attention(q, k_cache, v_cache, **arguments):
        seen.append((tuple(arguments["block_table"].shape), arguments["max_seqlen_q"], arguments["max_seqlen_k"]))
        return paged.attention(q, k_cache, v_cache, **arguments)

    config = configs.get("stdlib-1m")
    cache = PagedCache(config, 40, 4, attention=attention, max_model_len=30)
    q, kv = torch.randn(5, config.num_heads, config.head_dim), torch.randn(5, config.num_kv_heads, config.head_dim)
    for lens, past, bound in (([5], [0], None), ([1, 4], [5, 0], None), ([2, 3], [6, 4], 5)):
        batch = Batch.build(range(len(lens)), [[0] * n for n in lens], past)
        batch.max_seqlen_q = bound
        cache.prepare(batch)
        cache.attend(0, q, kv, kv)
    assert seen == [((1, 8), 5, 32), ((2, 8), 4, 32), ((2, 8), 5, 32)]
    for length, message in ((31, "sequence 9 would have 31 tokens; the cache's max_model_len is 30"), (30, None)):
        batch = Batch.build([9], [[0] * length], [0])
        if message is None:
            cache.prepare(batch)
            continue
        with pytest.raises(ValueError, match=message):
            cache.prepare(batch)
        assert 9 not in cache
    for wrong in (0, 2.5, True, "all", 2**31):
        with pytest.raises(ValueError, match="max_model_len"):
            PagedCache(config, 40, 4, max_model_len=wrong)
    assert PagedCache(config, 40, 4, max_model_len=2**31 - 1)._columns == 40  # no sequence has more than all blocks
    for bound in (4, 2**31):
        batch = Batch.build([11, 12], [[0], [0] * 5], [0, 0])
        batch.max_seqlen_q = bound
        with pytest.raises(ValueError, match=f"max_seqlen_q is {bound}; a sequence has 5 new tokens"):
            cache.prepare(batch)
        assert 11 not in cache


def test_the_model_writes_the_same_text_through_pages():
    model, ids = (
        zoo.load("stdlib-1m", device=ON, dtype=torch.float32),
        zoo.tokenizer().encode("def heappop(heap):\n").ids,
    )
    prompts, params = [ids, ids[:3], ids * 3], SamplingParams(max_tokens=12)
    rows = generate(model, NaiveCache(model.config, 3, 256, device=ON), prompts, params)
    pages = PagedCache(model.config, 40, 5, device=ON)
    assert [g.tokens for g in generate(model, pages, prompts, params)] == [g.tokens for g in rows]
    assert pages.manager.pool.num_free == 40
    pages.manager.audit()


# --- the kernels ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_kernel_passes(case, dtype):
    before = runtime.launches["paged_attention_kernel"]
    testing.check_attention(paged.attention, case, dtype=dtype, device=ON, **CHECKED)
    assert runtime.launches["paged_attention_kernel"] > before or case.name == "nothing to do"


@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_torch_reference_passes(case):
    testing.check_attention(paged.attention, case, device=ON, impl="torch")


@needs_triton
@pytest.mark.parametrize("head_dim", [40, 72, 192, 256])
@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_other_head_and_block_sizes(head_dim, block_size):
    case = testing.AttentionCase(
        f"head {head_dim}, block {block_size}", (3, 1), (21, 18), head_dim=head_dim, block_size=block_size, num_heads=6
    )
    testing.check_attention(paged.attention, case, device=ON, **CHECKED)


@pytest.mark.parametrize("fill", [float("nan"), 0.0, 1e4, float("inf")])
@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_unused_slots_never_show(fill, impl):  # P1
    torch.manual_seed(0)
    k, v = torch.full((2, 2, 4, 1, 2), fill, device=ON)
    keys = torch.randn(5, 1, 2, device=ON)
    paged.reshape_and_cache(keys, torch.ones_like(keys), k, v, torch.arange(5, device=ON), impl=impl)
    i32 = {"dtype": torch.int32, "device": ON}
    for queries in (1, 5):
        out = paged.attention(
            torch.randn(queries, 1, 2, device=ON), k, v, block_table=torch.tensor([[0, 1]], **i32),
            cu_seqlens_q=torch.tensor([0, queries], **i32), seqused_k=torch.tensor([5], **i32), impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_padding_writes_nothing(impl):  # P2
    k, v = torch.zeros(2, 2, 4, 1, 1, device=ON)
    new = torch.tensor([1.0, 2.0, 3.0], device=ON).view(3, 1, 1)
    paged.reshape_and_cache(new, new, k, v, torch.tensor([0, -1, 1], device=ON), impl=impl)
    assert k.flatten().tolist() == v.flatten().tolist() == [1, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(("heads", "size", "v_size"), [(3, 40, 40), (1, 7, 7), (2, 64, 32)])
def test_writing_through_strides(impl, heads, size, v_size):
    torch.manual_seed(0)
    qkv = torch.randn(5, heads + 2, size + v_size, device=ON)  # as a fused projection leaves them
    k, v = qkv[:, 1 : heads + 1, :size], qkv[:, 1 : heads + 1, size:]
    pools = [torch.full((4, 3, heads, d), float("nan"), device=ON) for d in (size, v_size)]
    slots = torch.tensor([11, 0, -1, 4, 5], device=ON)
    paged.reshape_and_cache(k, v, *pools, slots, impl=impl)
    for pool, new in zip(pools, (k, v), strict=True):
        flat = pool.flatten(0, 1)
        assert torch.equal(flat[slots[slots >= 0]], new[slots >= 0])
        assert int(flat.isnan().all(-1).all(-1).sum()) == 12 - 4


@needs_triton
@pytest.mark.parametrize(("tokens", "heads", "size", "block_size"), [(1, 1, 1, 1), (7, 2, 40, 3), (20, 1, 256, 128)])
def test_the_kernel_writes_what_pytorch_writes(tokens, heads, size, block_size):
    torch.manual_seed(0)
    new = torch.randn(2, tokens, heads, size, device=ON)
    pools = torch.full((2, 2, 40, block_size, heads, size), float("nan"), device=ON)
    slots = torch.randperm(40 * block_size, device=ON)[:tokens]
    slots[1::4] = -1
    for pool, impl in zip(pools, ("triton", "torch"), strict=True):
        paged.reshape_and_cache(*new, *pool, slots, impl=impl)
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(3, 2, 5)}, {"k": torch.zeros(3, 8)}, {"v": torch.zeros(2, 2, 4)}, {"v": torch.zeros(3, 1, 4)},
        {"k": torch.zeros(3, 4, 2).transpose(1, 2)}, {"k_cache": torch.zeros(2, 3, 2, 4)},
        {"slot_mapping": torch.zeros(3, dtype=torch.int32)}, {"slot_mapping": torch.zeros(2, dtype=torch.int64)},
        {"slot_mapping": torch.zeros(3, dtype=torch.int64, device="meta")}, {"impl": "cuda"},
        {"slot_mapping": torch.tensor(-1).expand(3)}, {"slot_mapping": torch.arange(6)[::2]},
        {"k_cache": torch.zeros(2, 0, 2, 4), "v_cache": torch.zeros(2, 0, 2, 4)},
        {"k_cache": torch.zeros(2, 4, 2, 4, requires_grad=True)},
        {"k": torch.zeros(3, 2, 4, requires_grad=True)},
    ],
    ids=str,
)  # fmt: skip
def test_a_write_that_does_not_fit_is_refused(change):
    good = {
        "k": torch.ones(3, 2, 4), "v": torch.ones(3, 2, 4), "k_cache": torch.zeros(2, 4, 2, 4),
        "v_cache": torch.zeros(2, 4, 2, 4), "slot_mapping": torch.arange(3),
    }  # fmt: skip
    pools = good["k_cache"], good["v_cache"]
    with pytest.raises(ValueError):
        paged.reshape_and_cache(**{**good, **change})
    assert not pools[0].any()
    assert not pools[1].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 64)), ("q", torch.zeros(2, 3, 64)), ("q", torch.zeros(2, 4, 32)),
        ("q", torch.zeros(2, 4, 64, dtype=torch.int32)), ("q", torch.zeros(2, 4, 64, dtype=torch.bfloat16)),
        ("q", torch.zeros(2, 64, 4).transpose(1, 2)), ("q", torch.zeros(2, 4, 64, requires_grad=True)),
        ("v_cache", torch.zeros(5, 16, 2, 64)), ("block_table", torch.zeros(1, 2, dtype=torch.int64)),
        ("block_table", torch.zeros(2, 2, dtype=torch.int32)), ("cu_seqlens_q", torch.zeros(3, dtype=torch.int32)),
        ("seqused_k", torch.zeros(1)), ("seqused_k", torch.zeros(1, 1, dtype=torch.int32)), ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, dtype=torch.float64)), ("tree_mask", torch.zeros(3, dtype=torch.int64)),
        ("tree_mask", torch.zeros(2, dtype=torch.int32)), ("out", torch.zeros(2, 4, 32)), ("softcap", -1.0),
        ("softcap", float("nan")), ("softcap", True), ("softcap", None), ("window_size", (-2, 0)), ("impl", "hopper"),
        ("window_size", None), ("window_size", (1.5, 0)), ("softmax_scale", float("nan")), ("softmax_scale", "a"),
        ("max_seqlen_q", 1), ("max_seqlen_q", -1), ("max_seqlen_q", 2.0), ("sinks", torch.zeros(4, requires_grad=True)),
        ("q", torch.zeros(2, 0, 64)), ("seqused_k", torch.tensor([99], dtype=torch.int32)),
        ("seqused_k", torch.zeros(1, dtype=torch.int32, device="meta")),
    ],
    ids=str,
)  # fmt: skip
def test_attention_refuses_what_does_not_fit(name, value):
    inputs = testing.AttentionCase("plain", (2,), (20,)).build()
    arguments = {
        **{n: getattr(inputs, n) for n in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k")},
        name: value,
    }
    q, k, v = (arguments.pop(n) for n in ("q", "k_cache", "v_cache"))
    out = arguments.setdefault("out", torch.full((2, 4, 64), float("nan")))
    kept = out.clone()
    with pytest.raises(ValueError, match=r"must be|requires grad"):
        paged.attention(q, k, v, **arguments)
    assert torch.equal(out.nan_to_num(), kept.nan_to_num())


def test_contents_are_checked_when_asked(monkeypatch):
    monkeypatch.setattr(runtime, "CHECK", True)
    for name, value in (
        ("cu_seqlens_q", [1, 2]), ("cu_seqlens_q", [0, 3]), ("seqused_k", [-1]), ("seqused_k", [99]),
        ("block_table", [[-1, 0, 0, 0]]), ("block_table", [[9, 9, 99, 0]]),
    ):  # fmt: skip
        inputs = testing.AttentionCase("plain", (2,), (40,)).build()
        setattr(inputs, name, torch.tensor(value, dtype=torch.int32))
        with pytest.raises(ValueError, match=name):
            inputs.call(paged.attention)
    k = torch.zeros(2, 4, 1, 2)
    for slots in ([0, 0], [0, 8]):
        with pytest.raises(ValueError, match="slot_mapping"):
            paged.reshape_and_cache(torch.ones(2, 1, 2), torch.ones(2, 1, 2), k, k.clone(), torch.tensor(slots))


BUGS = {
    "mask off by one": ("there = k_index < high", "there = k_index <= high"),
    "stale values read": ("there[:, None] & (dv < DV)[None, :])", "(dv < DV)[None, :] & (k_index >= 0)[:, None])"),
    "wrong head map": ("head = kv_head * GROUP + rows % GROUP", "head = kv_head + (rows % GROUP) * tl.num_programs(1)"),
    "page of another sequence": ("seq * table_row +", "0 * table_row +"),
    "positions from the wrong end": (
        "visible(q_index, k_index, bits, key_bits, q_len, kv_len,",
        "visible(q_index, k_index, bits, key_bits, 0, kv_len,",
    ),
    "sink forgotten in the sum": ("total += tl.where(live, tl.exp(sink - peak), 0.0)", "pass"),
    "cap forgotten": ("scores = cap(scores, softcap)", "pass"),
}  # fmt: skip


@needs_triton
@pytest.mark.skipif(runtime.HAS_GPU, reason="a stale or stray read may end the process on a GPU")
def test_bugs_in_the_kernel_are_caught():
    names = "group 5; sinks; softcap; chunk that ends in mid-page; page edge, prefill; decode and prefill in one batch"
    few = [
        case for name in names.split("; ") for case in testing.cases(ON) if case.name == name
    ]  # the quick ones first
    assert len(few) == 6

    def check(attention):
        for case in few:
            testing.check_attention(attention, case, **CHECKED)

    testing.assert_caught(check, paged._kernels.paged_attention_kernel, BUGS, give="attention")


@needs_triton
@pytest.mark.skipif(runtime.HAS_GPU, reason="a stray write may end the process on a GPU")
def test_bugs_in_the_copy_are_caught():
    def check(write):
        room = torch.zeros(2, 5, 4, 2, 3)  # a block before and behind the pool, so that a stray write hurts nobody
        k, v = room[:, 1:4]
        new = torch.arange(1.0, 19).view(3, 2, 3)
        write(new, -new, k, v, torch.tensor([5, -1, 10]), **KERNEL)
        want = torch.zeros(2, 20, 2, 3)
        want[0, [9, 14]], want[1, [9, 14]] = new[[0, 2]], -new[[0, 2]]
        assert torch.equal(room.flatten(1, 2), want)

    testing.assert_caught(
        check, paged._kernels.reshape_and_cache_kernel,
        {
            "padding overwrites the last slot": ("if slot >= 0:", "if slot >= -1:"),
            "offset lost": ("offset * kc_slot", "0 * kc_slot"),
            "keys for values": ("tl.load(v_ptr +", "tl.load(k_ptr +"),
            "one head only": ("offset * kc_slot + head * kc_head", "offset * kc_slot + 0 * kc_head"),
        },
        give="reshape_and_cache",
    )  # fmt: skip


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_gather_gives_what_the_pages_hold(block_size):
    case = testing.AttentionCase("x", (1, 2, 0, 1), (5, 33, 0, 16), block_size=block_size, padding="garbage")
    inputs = case.build(device=ON)
    dense = paged.gather(inputs.k_cache, inputs.block_table, inputs.seqused_k)
    for b, length in enumerate(case.kv_lens):
        pages = inputs.block_table[b, : -(-length // block_size)].long()
        assert torch.equal(dense[b, :length], inputs.k_cache[pages].flatten(0, 1)[:length])
        assert not dense[b, length:].any()
    assert paged.gather(inputs.k_cache, inputs.block_table, inputs.seqused_k, 33).shape[1] == 33
    with pytest.raises(ValueError, match="max_seqlen_k"):
        paged.gather(inputs.k_cache, inputs.block_table, inputs.seqused_k, 10**6)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_flashinfers_form_and_back():
    table = torch.tensor([[4, 2, -1], [7, -1, -1], [-1, -1, -1], [0, 1, 5]], dtype=torch.int32)
    used = torch.tensor([5, 4, 0, 12], dtype=torch.int32)
    indptr, indices, last = paged.to_flashinfer(table, used, 4)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 3, 3, 6], [4, 2, 7, 0, 1, 5], [1, 4, 0, 4])
    again, lengths = paged.from_flashinfer(indptr, indices, last, 4)
    assert torch.equal(again, table)
    assert torch.equal(lengths, used)
    assert {t.dtype for t in (indptr, indices, last, again, lengths)} == {torch.int32}
    for bad in ([1, 2], [0, 9], [0, 3, 2, 6, 6]):
        with pytest.raises(ValueError, match="kv_indptr"):
            paged.from_flashinfer(ints(*bad), indices, last[: len(bad) - 1], 4)
    for name, change in (
        ("kv_last_page_len", {"kv_last_page_len": ints(5)}), ("kv_indices", {"kv_indices": ints(-7)}),
        ("kv_indices", {"kv_indices": torch.tensor([2**32 + 1])}),
        ("kv_indptr", {"kv_indptr": torch.tensor([0.0, 1.0])}),
    ):  # fmt: skip
        good = {"kv_indptr": ints(0, 1), "kv_indices": ints(3), "kv_last_page_len": ints(2)}
        with pytest.raises(ValueError, match=name):
            paged.from_flashinfer(**{**good, **change}, block_size=4)
    for lengths in (ints(5, 4, 0, 13), ints(5, 4, -1, 12), used.long()):
        with pytest.raises(ValueError, match="seqused_k"):
            paged.to_flashinfer(table, lengths, 4)
    with pytest.raises(ValueError, match="block_size 0"):
        paged.to_flashinfer(table, used, 0)


@needs_triton
@pytest.mark.parametrize("softcap", [0.3, 5.0, 30.0, 50.0, 1e6, 1e9])
def test_any_softcap(softcap):
    for head_dim in (40, 64):
        case = testing.AttentionCase("cap", (1, 5), (5, 40), head_dim=head_dim, options={"softcap": softcap})
        testing.check_attention(paged.attention, case, device=ON, **CHECKED)


@needs_triton
@pytest.mark.parametrize("window", [(2**31 - 1, 0), (-1, 2**31 - 1), (2**40, 2**40)])
def test_a_window_wider_than_any_text(window):
    case = testing.AttentionCase("wide", (3, 1), (21, 18), options={"causal": False, "window_size": window})
    testing.check_attention(paged.attention, case, device=ON, **CHECKED)


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_spare_row_beside_a_tree(impl):
    config = testing.CACHES[0].config
    cache = PagedCache(config, 8, 4, device=ON, impl=impl)
    testing.poison(cache)
    cache.prepare(Batch.build([0, None], [[1, 2], [3]], [0, 0], tree_mask=[[1, 3], [1]], device=ON))
    q = torch.randn(3, config.num_heads, config.head_dim, device=ON)
    k = torch.randn(3, config.num_kv_heads, config.head_dim, device=ON)
    out = cache.attend(0, q, k, k)
    assert out[:2].isfinite().all()
    assert not out[2].any()


def test_keep_reads_copies_that_are_still_due():
    config = testing.CACHES[0].config
    cache = PagedCache(config, 8, 4)
    testing.poison(cache)
    cache.prepare(Batch.build([0], [[1] * 6], [0]))
    k = torch.randn(6, config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        cache.attend(layer, torch.randn(6, config.num_heads, config.head_dim), k, k)
    cache.fork(0, 1)
    cache.manager.ensure(1, 7)  # as a scheduler does; the copy is not made yet
    cache.keep(1, 4, [1])
    assert torch.equal(cache.k[0].flatten(0, 1)[cache.manager.slots(1, 0, 5)], k[[0, 1, 2, 3, 5]])
    assert torch.equal(cache.k[1].flatten(0, 1)[cache.manager.slots(0, 0, 6)], k)
    cache.manager.audit()


def test_a_refused_keep_leaves_the_prepared_batch():
    config = testing.CACHES[0].config
    cache = PagedCache(config, 8, 4)
    cache.prepare(Batch.build([0], [[1] * 3], [0]))
    with pytest.raises(ValueError, match="keep"):
        cache.keep(0, 1, [5])
    k = torch.randn(3, config.num_kv_heads, config.head_dim)
    assert cache.attend(0, torch.randn(3, config.num_heads, config.head_dim), k, k).isfinite().all()


@pytest.mark.parametrize("change", ["free", "truncate", "keep"])
def test_attend_after_a_sequence_changed_needs_a_new_prepare(change):
    config = testing.CACHES[0].config
    cache = PagedCache(config, 8, 4)
    cache.prepare(Batch.build([0], [[1] * 3], [0]))
    {"free": lambda: cache.free(0), "truncate": lambda: cache.truncate(0, 2), "keep": lambda: cache.keep(0, 1, [1])}[
        change
    ]()
    with pytest.raises(ValueError, match="prepare"):
        cache.attend(0, torch.zeros(3, config.num_heads, config.head_dim), None, None)


def test_a_pool_survives_what_is_no_count_or_block():
    pool = BlockPool(4, 4)
    for bad in (1.0, True, "a", None):
        with pytest.raises(ValueError, match="count"):
            pool.allocate(bad)
    blocks = pool.allocate(2)
    pool.share(np.array([blocks[0]]))
    for bad in (np.array([0.0]), "ab", 5, torch.tensor([0.5])):
        with pytest.raises(ValueError):
            pool.free(bad)
    pool.free(np.array(blocks))
    pool.free(torch.tensor(blocks[:1]))
    assert {type(b) for b in pool.free_order()} == {int}
    assert sorted(pool.free_order()) == [0, 1, 2, 3]
    for bad in ({"dtype": "float32"}, {"impl": "bogus"}, {"attention": None}):
        with pytest.raises(ValueError):
            PagedCache(testing.CACHES[0].config, 4, 4, **bad)
