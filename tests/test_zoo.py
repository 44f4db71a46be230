"""The shipped models: files, tokenizer, held-out text, corpus split, training and scoring."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import bench, checkpoint, config, doctor, zoo
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig
from kvlab.model import Decoder
from kvlab.speculative import Heads
from kvlab.zoo import baselines, evaluate, scoring, train, train_heads, training
from kvlab.zoo import corpus as corpora

MEASURED = Path(__file__).parents[1] / "book" / "measured"
TINY = ModelConfig("tiny", 2, 32, 2, 1, 16, 48, 300, 64, tie_embeddings=True)
PLAN = train.Plan(
    steps=8, batch_size=2, sequence_length=32, warmup=3, dropout=0.2, eval_every=4, save_every=2, learning_rate=1e-2
)


def tiny_files(count: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        np.concatenate([[0], np.cumsum(rng.integers(1, 3, 90 + i)) % 290 + 1]).astype(np.uint16) for i in range(count)
    ]


def run(out: Path, plan: train.Plan = PLAN, **more):
    validation = [(tiny_files()[0].astype(np.int64), 200)]
    return train.train(TINY, plan, tiny_files(), validation, out, log=lambda _: None, **more)


# ------------------------------------------------------------------------------------------------- shipped files


@pytest.mark.parametrize("name", zoo.NAMES)
def test_both_load_with_the_published_shape(name):
    model = zoo.load(name, device="cpu")
    assert dataclasses.replace(model.config, name=name) == config.get(name)
    assert model.dtype == torch.float32
    assert zoo.load(name, device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert model.config.vocab_size == zoo.tokenizer().get_vocab_size() == corpora.VOCAB_SIZE


def test_weights_are_small_and_the_manifest_names_every_file():
    manifest = json.loads((zoo.FOLDER / "manifest.json").read_text())
    weights = sorted(zoo.FOLDER.glob("*/model.safetensors"))
    assert len(weights) == 2
    assert sum(file.stat().st_size for file in weights) < 16e6
    assert {str(file.relative_to(zoo.FOLDER)) for file in weights} < set(manifest)


@pytest.mark.parametrize(
    "file", ["stdlib-1m/model.safetensors", "stdlib-1m/config.json", "tokenizer.json", "held_out.json"]
)
def test_a_changed_or_missing_file_is_named(tmp_path, monkeypatch, file):
    for relative in json.loads((zoo.FOLDER / "manifest.json").read_text()):
        if not relative.startswith("stdlib-7m"):
            (tmp_path / relative).parent.mkdir(exist_ok=True)
            shutil.copy(zoo.FOLDER / relative, tmp_path / relative)
    shutil.copy(zoo.FOLDER / "manifest.json", tmp_path)
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    read = {"tokenizer.json": zoo._tokenizer_json.__wrapped__, "held_out.json": zoo._held_out.__wrapped__}
    load = read.get(file, lambda: zoo.load("stdlib-1m", device="cpu"))
    load()
    data = bytearray((tmp_path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ValueError, match=f"{file}.*checksum"):
        load()
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=f"{file}.*missing"):
        load()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="stdlib-7m, stdlib-1m"):
        zoo.load("stdlib-70b")
    for bad in ({"device": ""}, {"device": []}, {"device": "gpu0"}, {"dtype": 0}, {"dtype": torch.int32}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            zoo.load("stdlib-1m", **{"device": "cpu", **bad})


@pytest.mark.skipif(torch.cuda.is_available(), reason="device 0 is the GPU here")
def test_device_0_is_a_gpu_and_not_whatever_is_there():
    with pytest.raises(ValueError, match="device is 0"):
        zoo.load("stdlib-1m", 0)


@pytest.mark.parametrize("text", ["[]", "null", "5", "{", "[" * 100_000, '{"stdlib-1m/config.json": 5}', None])
def test_a_manifest_that_is_none_is_named(tmp_path, monkeypatch, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        zoo.load("stdlib-1m", device="cpu")
    assert [(f.level, "manifest.json" in f.text) for f in doctor._models()] == [("bad", True)] * 2


def test_a_tokenizer_is_the_callers_own():
    zoo.tokenizer().enable_truncation(3)
    assert len(zoo.tokenizer().encode("a = b + c\n" * 9).ids) > 3


@settings(max_examples=60, deadline=None)
@given(st.text() | st.text(alphabet=" \n\t\r_.dexf09(:\u00e9\U0001f600", max_size=60))
def test_any_text_survives_the_tokenizer(text):
    assert zoo.tokenizer().decode(zoo.tokenizer().encode(text).ids) == text


def test_special_token_and_pieces():
    tokenizer = zoo.tokenizer()
    assert tokenizer.token_to_id(corpora.END_OF_TEXT) == 0
    assert 0 not in tokenizer.encode(f"x = '{corpora.END_OF_TEXT}'").ids
    assert tokenizer.encode("        return self.x\n").tokens[0] == "\u0120" * 8  # an indentation is one token
    assert len(tokenizer.encode("2024").ids) == 4  # digits stand alone


def test_held_out_text_is_whole_modules_with_their_tests():
    names = set(zoo.held_out())
    for module in corpora.HELD_OUT:
        assert {f"python3.11/{module}.py", f"python3.11/test/test_{module}.py"} <= names
    assert all(corpora.split_of(name) == "held_out" for name in names)
    assert all(scoring.is_python_or_prefix(text) for text in zoo.held_out().values())
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (zoo.FOLDER / "LICENSE-held_out.txt").read_text()


def test_shipped_weights_score_what_was_recorded():
    records = [r for r in bench.load(MEASURED / "zoo_evaluation.json") if r.bench == "zoo.sample_bits_per_byte"]
    assert {r.impl for r in records} == set(zoo.NAMES)
    for record in records:
        files = scoring.encode({"sample": zoo.held_out()[record.shape["file"]]}, zoo.tokenizer())
        found = scoring.bits_per_byte(zoo.load(record.impl, device="cpu"), files)
        assert found == pytest.approx(record.value, rel=0.01)


def test_recorded_figures_reach_their_goals():
    records = bench.load(MEASURED / "zoo_evaluation.json")
    bits = {r.impl: r.value for r in records if r.bench == "zoo.bits_per_byte"}
    assert bits["stdlib-7m"] <= 0.85 * min(bits["xz -9e"], bits["5-gram"])
    valid = next(r for r in records if r.bench == "zoo.completions" and r.impl == "stdlib-7m")
    assert valid.shape["count"] == 200
    assert valid.value >= 0.6
    curve = [r for r in bench.load(MEASURED / "zoo_training.json") if r.bench == "zoo_training.loss_curve"]
    for name in zoo.NAMES:
        points = [(r.shape["step"], r.value) for r in curve if r.impl == name]
        assert points == sorted(points)
        assert len(points) >= 5
        assert points[-1][1] < points[0][1]
    commands = {r.impl: r.shape["command"] for r in bench.load(MEASURED / "zoo_training.json") if "command" in r.shape}
    assert all(commands[name].split()[3] == name for name in zoo.NAMES)


# -------------------------------------------------------------------------------------------------------- corpus


def write(root: Path, **files: str) -> Path:
    for module in corpora.HELD_OUT:
        files.setdefault(f"{module}.py", f"# the module {module}\n")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_no_held_out_text_reaches_training(tmp_path):
    secret = "".join(
        f"def secret_{i}(a, b):\n    return a * {i} + b * {i * i} - some_other_constant\n" for i in range(12)
    )
    newer = secret.replace("secret_", "later_")
    first = write(
        tmp_path / "python3.11",
        **{
            "heapq.py": secret, "test/test_heapq.py": "check = 1\n", "test/test_heapq/more.py": "more = 1\n",
            "_heapq.py": "accelerated = 1\n", "gzip.py": "validation = 1\n", "os.py": "import sys\n",
            "copied.py": "# a copy\n" + secret.replace("\n", "\n\n"), "site-packages/x.py": "foreign = 1\n",
            "heapq_notes.py": "kept = 1\n",
        },
    )  # fmt: skip
    second = write(
        tmp_path / "python3.12",
        **{"heapq.py": newer, "also.py": "if True:\n    " + newer.replace("\n", "\n    ") + "pass\n",
           "os.py": "import sys\n", "new.py": "fresh = 1\n"},
    )  # fmt: skip
    found = corpora.collect([first, second])
    assert set(found.train) == {"python3.11/os.py", "python3.11/heapq_notes.py", "python3.12/new.py"}
    assert sorted(found.dropped) == ["python3.11/copied.py", "python3.12/also.py"]
    assert set(found.validation) == {"python3.11/gzip.py"}
    held = {name.removeprefix("python3.11/") for name in found.held_out}
    assert {"heapq.py", "_heapq.py", "test/test_heapq.py", "test/test_heapq/more.py"} <= held
    assert not any(name.startswith("python3.12") for name in found.held_out)
    assert corpora.overlapping(found.train, [secret, newer]) == []
    corpora.save(found, tmp_path / "c.json.gz")
    assert corpora.load(tmp_path / "c.json.gz") == found


def test_a_folder_that_is_no_library_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.py file"):
        corpora.collect([tmp_path])
    (tmp_path / "os.py").write_text("import sys\n")
    with pytest.raises(ValueError, match="lacks bisect"):
        corpora.collect([tmp_path])


def test_a_fresh_tokenizer_is_byte_level():
    tokenizer = corpora.train_tokenizer(["def f(x):\n    return x\n"] * 3, vocab_size=270)
    assert tokenizer.decode(tokenizer.encode("\u00e9\x00 def").ids) == "\u00e9\x00 def"


# ------------------------------------------------------------------------------------------------------ training


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    whole, whole_curve = run(tmp_path / "whole")
    for stop in (3, 5):
        run(tmp_path / "parts", stop_after=stop)
    parts, parts_curve = run(tmp_path / "parts")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    keep = ("step", "train_loss", "validation", "learning_rate")
    assert [[p[k] for k in keep] for p in whole_curve] == [[p[k] for k in keep] for p in parts_curve]
    assert [p["step"] for p in whole_curve] == [4, 8]


def test_training_learns_and_dropout_is_off_in_scoring(tmp_path):
    plan = dataclasses.replace(PLAN, steps=60, eval_every=30)
    model, curve = run(tmp_path, plan)
    assert curve[-1]["train_loss"] < 0.8 * math.log(TINY.vocab_size)
    ids = tiny_files()[0].astype(np.int64)
    assert scoring.total_bits(model, ids) == scoring.total_bits(model, ids)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    run(tmp_path, stop_after=2)
    with pytest.raises(ValueError, match=r"another plan.*learning_rate"):
        run(tmp_path, dataclasses.replace(PLAN, learning_rate=0.5))


def test_a_write_that_breaks_off_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    run(tmp_path, stop_after=2)
    before = (tmp_path / "state.safetensors").read_bytes()

    def broken(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(training, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        run(tmp_path, stop_after=4)
    assert (tmp_path / "state.safetensors").read_bytes() == before


def test_windows_depend_on_the_step_alone_and_do_not_repeat_within_an_epoch():
    a = train.Windows(tiny_files(), 16, 3, seed=1)
    b = train.Windows(tiny_files(), 16, 3, seed=1)
    batches = [a.batch(step) for step in range(2 * a.per_epoch)]
    assert torch.equal(b.batch(a.per_epoch + 1), batches[a.per_epoch + 1])
    assert torch.equal(b.batch(0), batches[0])
    assert not torch.equal(batches[0], batches[a.per_epoch])
    assert all(x.shape == (3, 17) for x in batches)
    counted = [np.arange(400).astype(np.uint16)]
    one = train.Windows(counted, 16, 3, seed=1)
    rows = torch.cat([one.batch(s) for s in range(one.per_epoch)])
    assert len(set(rows[:, 0].tolist())) == len(rows) > 3
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)
    with pytest.raises(ValueError, match="one batch needs"):
        train.Windows(counted, 256, 2, seed=0)


def test_distillation_mixes_text_and_teacher():
    torch.manual_seed(0)
    plan = dataclasses.replace(PLAN, distill=0.25, dropout=0.0)
    student, teacher = Decoder(TINY), Decoder(TINY)
    for p in teacher.parameters():
        p.data.mul_(8)
    rows = torch.randint(0, 300, (2, 33))
    batch = Batch.build([0, 1], rows[:, :-1].tolist(), [0, 0], all_logits=True)
    s, t = (m(batch, NoCache(TINY)) for m in (student, teacher))
    text = torch.nn.functional.cross_entropy(s, rows[:, 1:].flatten())
    imitation = torch.nn.functional.cross_entropy(s, t.softmax(-1))
    torch.testing.assert_close(train._Loss(student, plan, teacher)(rows), 0.75 * text + 0.25 * imitation)
    torch.testing.assert_close(train._Loss(student, plan, None)(rows), text)


def test_the_command_trains_exports_and_records(tmp_path, capsys):
    text = "def f(x):\n    return x + 1\n" * 60
    pack = corpora.Corpus(train={"v/a.py": text, "v/b.py": text[::-1]}, validation={"v/gzip.py": text[:200]})
    corpora.save(pack, tmp_path / "c.json.gz")
    flags = f"stdlib-1m --corpus {tmp_path / 'c.json.gz'} --out {tmp_path / 'run'} --steps 2 --batch-size 2".split()
    train.main([*flags, "--sequence-length", "64", "--eval-every", "1", "--device", "cpu"])
    model = checkpoint.load(tmp_path / "run" / "model", device="cpu")
    assert model.dtype == torch.bfloat16
    records = bench.load(tmp_path / "run" / "records.json")
    assert records[0].shape["command"].startswith("python -m kvlab.zoo.train stdlib-1m --corpus")
    assert [r.shape["step"] for r in records[1:]] == [1, 2]
    assert "step 2/2" in capsys.readouterr().out


def test_the_rate_climbs_and_falls_to_nothing():
    rates = [PLAN.rate(step) for step in range(PLAN.steps + 1)]
    assert max(rates) == PLAN.learning_rate == rates[PLAN.warmup]
    assert rates[-1] == 0
    assert rates[: PLAN.warmup] == sorted(rates[: PLAN.warmup])
    assert rates[PLAN.warmup :] == sorted(rates[PLAN.warmup :], reverse=True)


# ------------------------------------------------------------------------------------------------------- scoring


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_score_each_prediction_once(length, context, data):
    stride = data.draw(st.integers(1, context))
    scored = []
    for start, end, first in scoring.windows(length, context, stride):
        assert start <= first <= end <= start + context
        scored += range(first, end)
    assert scored == list(range(length))


def test_bits_are_those_of_the_chain_rule():
    torch.manual_seed(0)
    model = Decoder(TINY)
    for p in model.parameters():
        p.data.mul_(4)
    ids = tiny_files()[0].astype(np.int64)[:50]
    batch = Batch.build([0], [ids.tolist()], [0], all_logits=True)
    logs = model(batch, NoCache(TINY)).log_softmax(-1)[:-1]
    expected = -logs[torch.arange(49), torch.from_numpy(ids[1:])].sum().item() / math.log(2)
    assert scoring.total_bits(model, ids) == pytest.approx(expected, rel=1e-5)
    assert scoring.bits_per_byte(model, [(ids, 100), (ids, 50)]) == pytest.approx(2 * expected / 150, rel=1e-5)
    assert scoring.total_bits(model, np.resize(ids, 200)) > 3 * expected
    assert scoring.named(model, ids).tolist() == logs.argmax(-1).tolist()
    with pytest.raises(ValueError, match="no bytes"):
        scoring.bits_per_byte(model, [])
    with pytest.raises(ValueError, match="stride is 65"):
        scoring.total_bits(model, ids, stride=65)


@pytest.mark.parametrize(
    ("agreed", "gamma", "tokens"),
    [("1" * 10, 4, 10 / 2), ("0" * 6, 4, 1.0), ("110", 4, 3.0), ("1101", 2, 4 / 2), ("10" * 5, 4, 2.0)],
)
def test_tokens_a_step(agreed, gamma, tokens):
    assert scoring.tokens_per_step(np.array([c == "1" for c in agreed]), gamma) == tokens


def test_a_draft_that_is_the_target_is_always_accepted():
    model = zoo.load("stdlib-1m", device="cpu")
    files = scoring.encode({"a": zoo.held_out()["python3.11/sched.py"]}, zoo.tokenizer())
    share, tokens = evaluate.acceptance(model, model, files, prompt=200, new=20)
    assert share == 1.0
    assert tokens == 5.0


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ("x = 1\n", True), ("def f():\n", True), ("try:\n    x = 1\n", True), ("x = (\n", True), ("'''open\n", True),
        ("if x:\n    pass\nelse:\n", True), ("class A:\n    def f(self):\n        return 1\n\n    @property\n", True),
        ("", True), ("# only a remark\n", True), ("x = )\n", False), ("def f(:\n", False), ("  x\n", False),
        ("return 3\n", False), ("x = 'open\n", False), ("if x:\npass\n", False), ("f(1\n\ndef g():\n", False),
        ("x = 1\n    y = 2\n", False), ("a\0b\n", False),
    ],
)  # fmt: skip
def test_python_or_prefix(source, good):
    assert scoring.is_python_or_prefix(source) is good


def test_prompts_are_headers_with_docstring_or_first_statement():
    source = (
        "import os\n\n@cache\ndef f(x):\n    '''Say.\n\n    More.'''\n    return x\n\n"
        "class A(B):\n    '''Doc.'''\n\n    def g(self):\n        y = 1\n        return y\n\n    def h(self): pass\n\n"
        "class C:\n    @property\n    def i(self):\n        '''I.'''\n        return 1\n"
    )
    assert scoring.function_prompts(source) == [
        "@cache\ndef f(x):\n    '''Say.\n\n    More.'''\n",
        "class A(B):\n    def g(self):\n        y = 1\n",
        "class C:\n    @property\n    def i(self):\n        '''I.'''\n",
    ]
    chosen = evaluate.choose_prompts(zoo.held_out(), 200)
    assert len(chosen) == 200
    assert all(map(scoring.is_python_or_prefix, chosen))
    assert scoring.full_lines("a\nb\nc") == "a\nb\n"
    with pytest.raises(ValueError, match="hold 3 functions"):
        evaluate.choose_prompts({"a": source}, 4)


def test_completions_keep_the_prompt_and_end_in_a_full_line():
    model = zoo.load("stdlib-1m", device="cpu")
    prompts = ["def add(a, b):\n    '''Return the sum of a and b.'''\n"]
    (text,) = evaluate.completions(model, prompts, max_tokens=24)
    assert text.startswith(prompts[0])
    assert text.endswith("\n")
    assert len(text) > len(prompts[0])


# ----------------------------------------------------------------------------------------------------- baselines


def test_kneser_ney_is_a_distribution_and_learns():
    model = baselines.KneserNey(["abracadabra " * 5, "hello world\n"], order=4)
    for context in (b"", b"abr", b"zzz", b"lo w"):
        total = sum(model.probabilities(context + bytes([b]))[-1] for b in range(256))
        assert total == pytest.approx(1, abs=1e-9)
    assert model.bits_per_byte(["abracadabra abracadabra "]) < 1.2 < 6 < model.bits_per_byte(["QXZJKV"])
    with pytest.raises(ValueError, match="order is 9"):
        baselines.KneserNey(["a"], order=9)
    with pytest.raises(ValueError, match="no bytes"):
        baselines.KneserNey([])


def test_xz_counts_the_whole_stream():
    assert baselines.xz_bits_per_byte(["abc" * 4000]) < 0.2 < 8 < baselines.xz_bits_per_byte(["abc"])
    with pytest.raises(ValueError, match="no bytes"):
        baselines.xz_bits_per_byte([])


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return train.build(TINY, PLAN, "cpu")


def heads_run(decoder: Decoder, out: Path, plan: train.Plan = PLAN, *, joint: bool = False, **more):
    validation = [(file.astype(np.int64), len(file)) for file in tiny_files()[:2]]
    sizes = {"num_heads": 3, "prompt": 8, "new": 6, "most": 3}
    return train_heads.train(
        decoder, plan, tiny_files(), validation, out, joint=joint, log=lambda _: None, **sizes, **more
    )


def test_heads_learn_and_the_frozen_decoder_does_not(decoder, tmp_path):
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    plan = dataclasses.replace(PLAN, steps=40, learning_rate=1e-2, eval_every=10)
    model, curve = heads_run(decoder, tmp_path, plan)
    assert model.decoder is decoder
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, before[name])
    assert curve[-1]["train_loss"] < curve[0]["train_loss"]
    assert 1 <= curve[-1]["validation"] <= 4


def test_joint_training_changes_a_copy(decoder, tmp_path):
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    model, _ = heads_run(decoder, tmp_path, joint=True)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not torch.equal(model.decoder.embed_tokens.weight, decoder.embed_tokens.weight)


@pytest.mark.parametrize("joint", [False, True])
def test_a_heads_loss_names_the_right_tokens(joint):
    """By hand, one row and place at a time."""
    plan = dataclasses.replace(PLAN, batch_size=2, sequence_length=9, dropout=0.0)
    decoder = train.build(TINY, plan, "cpu")
    heads = Heads(TINY.hidden_size, 3)
    for layer in heads.down:
        torch.nn.init.normal_(layer.weight)
    model = train_heads.HeadedModel(decoder, heads, plan, joint=joint, share=0.5)
    rows = torch.randint(0, TINY.vocab_size, (2, 10))
    losses, own = [[], [], []], []
    for row in rows:
        cache, batch = NoCache(TINY), Batch.build([0], [row[:9].tolist()], [0])
        cache.prepare(batch)
        states = decoder.hidden(batch, cache)
        logits = decoder.logits(states)
        own.append(torch.nn.functional.cross_entropy(logits, row[1:]))
        for t in range(9 - 3):
            made = states[t : t + 1]
            for k in range(3):
                made = heads(k, made, decoder.embed_tokens(row[t + 1 + k])[None])
                wanted = row[t + 2 + k] if joint else logits[t + 1 + k].softmax(0)
                losses[k].append(torch.nn.functional.cross_entropy(decoder.logits(made)[0], wanted))
    expected = torch.stack([torch.stack(one).mean() for one in losses]).mean()
    if joint:
        expected = torch.stack(own).mean() + 0.5 * expected
    torch.testing.assert_close(model.loss(rows), expected)


@pytest.mark.parametrize("joint", [False, True])
def test_heads_are_trained_in_mixed_precision_as_on_a_gpu(decoder, joint, monkeypatch):
    """Products in bfloat16, states and weights in float32, and a gradient for all that is trained."""
    autocast, kinds = torch.autocast, []
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype, enabled: autocast(kind, dtype))
    heads = Heads(decoder.config.hidden_size, 3)
    for layer in heads.down:
        torch.nn.init.normal_(layer.weight, std=0.1)
        layer.register_forward_hook(lambda layer, given, made: kinds.append(made.dtype))
    model = train_heads.HeadedModel(copy.deepcopy(decoder), heads, PLAN, joint=joint)
    loss = model.loss(torch.randint(0, TINY.vocab_size, (PLAN.batch_size, PLAN.sequence_length + 1)))
    loss.backward()
    assert loss.dtype == torch.float32
    assert set(kinds) == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == (joint or name.startswith("heads.")), name


def test_an_interrupted_run_of_heads_ends_as_an_uninterrupted_one(decoder, tmp_path):
    whole, curve = heads_run(decoder, tmp_path / "whole")
    heads_run(decoder, tmp_path / "parts", stop_after=3)
    parts, again = heads_run(decoder, tmp_path / "parts")
    for a, b in zip(whole.heads.parameters(), parts.heads.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p["validation"] for p in curve] == [p["validation"] for p in again]


def test_windows_shorter_than_the_heads_look_ahead_are_refused(decoder, tmp_path):
    with pytest.raises(ValueError, match="sequence_length is 3; it must be over num_heads, 3"):
        heads_run(decoder, tmp_path, dataclasses.replace(PLAN, sequence_length=3))


def test_one_command_trains_both_and_records_them(tmp_path, monkeypatch):
    stdlib = tmp_path / "python3.11"
    stdlib.mkdir()
    held = {f"{name}.py": f"def {name}():\n    return {name!r}\n" * 9 for name in corpora.HELD_OUT}
    texts = held | {"gzip.py": "def zipped(file):\n    return file.read()\n" * 40}
    texts |= {f"module{i}.py": f"def f{i}(x):\n    return x + {i}\n" * 60 for i in range(20)}
    for name, text in texts.items():
        (stdlib / name).write_text(text)
    checkpoint.save(train.build(dataclasses.replace(TINY, vocab_size=4096), PLAN, "cpu"), tmp_path / "target")
    train_heads.main([
        "--stdlib", str(stdlib), "--out", str(tmp_path / "out"), "--target", str(tmp_path / "target"), "--steps", "2",
        "--batch-size", "2", "--sequence-length", "32", "--eval-every", "1", "--device", "cpu", "--prompt", "16",
        "--new", "4", "--most", "2",
    ])  # fmt: skip
    records = bench.load(tmp_path / "out" / "records.json")
    assert {(r.bench, r.impl) for r in records} == {
        (f"heads_training.{part}", kind) for part in ("run", "curve") for kind in ("frozen", "joint")
    }
    for kind in ("frozen", "joint"):
        target = checkpoint.load(tmp_path / ("target" if kind == "frozen" else "out/joint/model"), device="cpu")
        assert Heads.load(tmp_path / "out" / kind / "heads.safetensors", target).num_heads == 4
    assert not (tmp_path / "out" / "frozen" / "model").exists()
