"""`python -m flashtrain.bench_training` from the command line to its files, on a CPU."""

import gc
import json
import re
import signal
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from commands import SMALL_BENCH_TRAINING, run_command

from flashtrain.bench_training import TrainerSteps
from flashtrain.kernels.attention.variants import VARIANTS

COMMAND = "python -m flashtrain.bench_training"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bench(tmp_path, capsys):
    """bench("key=value", ...) -> (what the terminal shows, bench_training.json)."""

    def run(*overrides):
        run_command(COMMAND, *SMALL_BENCH_TRAINING, "output=measured", *overrides)
        shown = capsys.readouterr().out
        return shown, json.loads((tmp_path / "measured" / "bench_training.json").read_text())

    return run


def mistake(*overrides):
    """The sentence that the command ends with, or its exit status."""
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, *SMALL_BENCH_TRAINING, *overrides)
    code = stop.value.code
    return code.removeprefix("error: ") if isinstance(code, str) else code


def rows_of(found, name):
    return [row for row in found["measurements"] if row["name"] == name]


def test_every_measurement_is_in_the_file_with_what_it_depends_on(bench, tmp_path):
    shown, found = bench("variants=[standard,sdpa_math]", "relative_to=standard", "lengths=[32,256]", "seed=3")
    settings = found["settings"]
    assert settings["model"]["hidden_size"] == 32 and settings["seed"] == 3 and settings["deterministic"] is False
    assert settings["trainer"]["device"] == "cpu" and (settings["warmup"], settings["steps"]) == (1, 2)
    assert found["provenance"]["packages"]["torch"] and {"commit", "device", "started"} <= set(found["provenance"])
    assert [state["after"] for state in found["gpu_states"]] == [None, 32, 256]
    rows = found["measurements"]
    assert [(row["length"], row["name"]) for row in rows] == [
        (length, name) for length in (32, 256) for name in ("standard", "sdpa_math")
    ]
    for row in rows:
        assert row["tokens_per_step"] == max(128, row["length"]) and len(row["readings_s"]) == 2
        assert row["tokens_per_second"] == pytest.approx(2 * row["tokens_per_step"] / sum(row["readings_s"]))
        assert row["no_speed"] is row["peak_gib"] is row["product_rate"] is row["share_of_product_rate"] is None
        assert row["predicted_peak_gib"] > 0
        pairs = 12 * 32 * (row["length"] + 1) / 2
        assert row["flops_per_token"] > pairs and row["flops_per_token"] - pairs == pytest.approx(
            rows[0]["flops_per_token"] - 12 * 32 * 33 / 2
        )
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert "| nano | 32 | 256 |" in text and f"`{COMMAND} trainer=cpu" in text
    ratio = rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert re.search(rf"\| `standard` \| [\d,]+ \(1.00x\) \| [^|]+\|\n\| `sdpa_math` \| [\d,]+ \({ratio:.2f}x\)", text)
    assert "on random tokens, float32 on cpu" in " ".join(shown.split())


def test_steps_are_those_of_train(bench, monkeypatch):
    """As many as asked for, in micro-batches, with the optimizer that is given; a round is a fit."""
    from flashtrain.training.module import TrainingModule

    taken, original = [], TrainingModule.training_step

    def step(self, batch, batch_idx):
        result = original(self, batch, batch_idx)
        optimizer = type(self.optimizers().optimizer).__name__
        taken.append((batch_idx, tuple(batch["inputs"].shape), self._micro_batch_rows, optimizer))
        return result

    monkeypatch.setattr(TrainingModule, "training_step", step)
    bench("variants=[sdpa_math]", "lengths=[32]", "trainer.micro_batch_tokens=64", "optimizer=muon")
    assert [index for index, *_ in taken] == [0, 1, 2] * 2
    assert {tuple(what) for _, *what in taken} == {((4, 32), 2, "MuonAdamW")}


def test_a_model_is_compiled_once_for_all_rounds(bench, monkeypatch):
    from torch._dynamo.utils import counters

    compile_as_ever = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **given: compile_as_ever(self, **given, backend="eager")
    )
    counters.clear()
    bench("variants=[standard,sdpa_math]", "trainer.compile=true", "rounds=3")
    assert counters["frames"] == {"total": 4, "ok": 4}, "one for each of two variants and lengths"


def test_a_refused_variant_stays_in_the_table_with_the_reason(bench, tmp_path):
    shown, found = bench("model.windows=[8]", "variants=[sdpa_flash,sdpa_math]")
    reason = "takes the full and the causal mask, not window(7, 0)"
    assert all(row["no_speed"].startswith(reason) for row in rows_of(found, "sdpa_flash"))
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert "| `sdpa_flash` | refused | refused |" in text and f"- sdpa_flash {reason}; " in text
    assert f"sdpa_flash {reason}" in " ".join(shown.split())
    assert all(row["tokens_per_second"] for row in rows_of(found, "sdpa_math"))


def test_a_variant_may_be_refused_at_one_length(bench, monkeypatch, tmp_path):
    def unsupported(spec):
        return "takes at most 32 keys" if spec.kv_len > 32 else VARIANTS["sdpa_math"].unsupported(spec)

    monkeypatch.setitem(VARIANTS, "sdpa_flash", replace(VARIANTS["sdpa_math"], unsupported=unsupported))
    bench("variants=[sdpa_flash,sdpa_math]")
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert re.search(r"^\| `sdpa_flash` \| [\d,]+ \| refused \|$", text, re.MULTILINE)


def test_a_lack_of_memory_is_the_end_of_its_row_alone(bench, monkeypatch, tmp_path):
    def attend(q, *rest):
        if q.shape[1] == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has ...")
        return VARIANTS["sdpa_math"].attend(q, *rest)

    monkeypatch.setitem(VARIANTS, "standard", replace(VARIANTS["standard"], attend=attend, attend_alone=None))
    _, found = bench("variants=[standard,sdpa_math]")
    word = "failed: out of memory, 16.00 GiB asked for"
    assert [row["no_speed"] for row in rows_of(found, "standard")] == [None, word]
    assert all(row["tokens_per_second"] for row in rows_of(found, "sdpa_math"))
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert re.search(rf"^\| `standard` \| [\d,]+ \| {word} \|$", text, re.MULTILINE)


def test_what_one_without_memory_has_taken_is_free_before_the_next_round(bench, monkeypatch):
    """Its model, and what its step had computed by then."""
    taken, alive = [], []

    def attend(q, *rest):
        taken.append(weakref.ref(q))
        raise torch.OutOfMemoryError

    def note(device_type):
        gc.collect()
        alive.append(sum(of() is not None for of in taken))
        return 0

    def build(self, config, variant):
        built(self, config, variant)
        if variant == "standard":
            taken.append(weakref.ref(self._made.model))

    built = TrainerSteps.__init__
    monkeypatch.setattr(TrainerSteps, "__init__", build)
    monkeypatch.setitem(VARIANTS, "standard", replace(VARIANTS["standard"], attend=attend, attend_alone=None))
    monkeypatch.setattr("flashtrain.performance.training_steps._held_bytes", note)
    bench("variants=[standard,sdpa_math]", "lengths=[32]", "rounds=3")
    assert len(taken) == 2 and max(alive) == 1 and alive[-1] == 0, "its model alone, until it fails"
    assert alive.index(0, alive.index(1)) < len(alive) - 2


def test_the_share_is_of_the_rate_measured_before_a_length(bench, monkeypatch, tmp_path):
    rates = iter((1e10, 2e10))
    monkeypatch.setattr("flashtrain.bench_training._product_rate", lambda device, seed: next(rates))
    _, found = bench("variants=[sdpa_math]")
    for row, rate in zip(rows_of(found, "sdpa_math"), (1e10, 2e10), strict=True):
        share = row["flops_per_token"] * row["tokens_per_second"] / rate
        assert row["product_rate"] == rate and row["share_of_product_rate"] == pytest.approx(share)
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert re.search(r"^\| `sdpa_math` \| [\d,]+ \(\d+ %\) \| [\d,]+ \(\d+ %\) \|$", text, re.MULTILINE)


@pytest.mark.gpu
def test_on_a_gpu_every_system_has_its_own_peak_and_is_compiled_once(bench, module):
    """The peer holds a GiB between its rounds, which is none of the others'."""
    from torch._dynamo.utils import counters

    def gpt(sequence_length, tokens):
        held = torch.empty(2**30, dtype=torch.int8, device="cuda")
        return lambda: held.add_(1), tokens

    module("other", gpt=gpt)
    counters.clear()
    variants = ["standard", "sdpa_math", "flash_v2"]
    changes = ["trainer.device=cuda", "model.head_dim=64", "rounds=3", "peers=[other:gpt]"]
    _, found = bench(f"variants=[{','.join(variants)}]", *changes)
    assert counters["frames"]["total"] == 2 * len(variants)
    for row in found["measurements"]:
        assert row["no_speed"] is None and row["product_rate"] > 1e12
        assert row["peak_gib"] == 1.0 if row["name"] == "other:gpt" else 0 < row["peak_gib"] < 0.5
        assert (row["share_of_product_rate"] is None) == (row["name"] == "other:gpt")


def test_a_peer_has_a_row_with_the_tokens_that_it_says(bench, module, tmp_path):
    calls = []

    def gpt(sequence_length, tokens):
        calls.append((sequence_length, tokens))
        return lambda: calls.append("step"), tokens // 2

    module("other.trainer", gpt=gpt)
    name = "other.trainer:gpt"
    _, found = bench(f"peers=[{name}]", f"relative_to={name}")
    assert [call for call in calls if call != "step"] == [(32, 128), (64, 128)] and calls.count("step") == 2 * 2 * 3
    assert found["provenance"]["peers"] == {name: []}
    for row in rows_of(found, name):
        assert row["tokens_per_step"] == 64 and row["tokens_per_second"] and len(row["readings_s"]) == 2
        assert row["flops_per_token"] is row["predicted_peak_gib"] is None
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert re.search(rf"^\| `{name}` \| [\d,]+ \(1.00x\) \| [\d,]+ \(1.00x\) \|$", text, re.MULTILINE)


def test_peers_that_raise_are_told_of_beside_the_others(bench, module):
    def raising(*_):
        raise ValueError("a row of 3 | 5 is odd\nthe rest of it")

    module("other", unbuilt=raising, broken=lambda length, tokens: (raising, tokens), exits=lambda *_: sys.exit(3))
    names = ["other:unbuilt", "other:broken", "other:exits"]
    _, found = bench(f"peers=[{','.join(names)}]", "lengths=[32]")
    told = [row["no_speed"] for name in names for row in rows_of(found, name)]
    reason = "failed: ValueError: a row of 3 | 5 is odd"
    assert told == [reason, reason, "failed: RuntimeError: raised SystemExit(3)"]
    assert rows_of(found, "sdpa_math")[0]["tokens_per_second"]


def test_what_a_peer_sets_for_all_is_set_back(bench, module):
    def gpt(sequence_length, tokens):
        torch.set_float32_matmul_precision("medium")
        return lambda: found.append(torch.get_float32_matmul_precision()), tokens

    found = []
    module("other", gpt=gpt)
    bench("peers=[other:gpt]", "lengths=[32]")
    assert set(found) == {"highest"}


def test_where_nothing_has_a_speed_the_reasons_are_the_result(tmp_path):
    assert mistake("variants=[sdpa_cudnn]", "output=measured") == 1
    assert "sdpa_cudnn runs on cuda, not on cpu" in (tmp_path / "measured" / "bench_training.md").read_text()


def test_one_step_without_warming_up_is_one_reading(bench, tmp_path):
    _, found = bench("warmup=0", "steps=1", "rounds=1", "variants=[sdpa_math]")
    assert all(len(row["readings_s"]) == 1 for row in found["measurements"])
    text = (tmp_path / "measured" / "bench_training.md").read_text()
    assert "A round times 1 step, with none before to warm up" in text and "- one reading of each\n" in text


@pytest.mark.parametrize("steps", [[], ["warmup=0", "steps=1"]], ids=["the first", "the only"])
def test_a_signal_ends_it_after_the_step_under_way(monkeypatch, tmp_path, steps):
    from flashtrain.training.module import TrainingModule

    original = TrainingModule.training_step

    def step(self, batch, batch_idx):
        if batch["inputs"].shape[1] == 64:
            signal.raise_signal(signal.SIGINT)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", step)
    assert mistake("output=measured", *steps) == "interrupted"
    found = json.loads((tmp_path / "measured" / "bench_training.json").read_text())
    assert [row["length"] for row in found["measurements"]] == [32, 32]


def test_without_lengths_it_is_that_of_the_settings(tmp_path):
    run_command(COMMAND, *SMALL_BENCH_TRAINING, "lengths=null", "train.sequence_length=32", "experiment=gpt2_long")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"[\d-]+_[\d-]+_bench_training", folder.name)
    found = json.loads((folder / "bench_training.json").read_text())
    assert found["lengths"] == [32] and found["settings"]["model"]["name"] == "gpt2"


@pytest.mark.parametrize("name", ["extend", "extend_theta"])
def test_an_extension_is_measured_without_the_run_that_it_starts_from(bench, name):
    _, found = bench(f"experiment={name}", "lengths=[32]")
    assert rows_of(found, "sdpa_math")[0]["tokens_per_second"]
    rope = found["settings"]["model"]["rope"]
    assert (rope["type"], rope["original_length"]) == (("yarn", 16_384) if name == "extend" else ("default", None))
    assert found["settings"]["model"]["positions"] == "rope"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("lenghts=[64]", "there is no setting lenghts; did you mean lengths?"),
        ("+lenghts=[64]", "there is no setting lenghts; did you mean lengths?"),
        ("lengths=64", "lengths takes a list"),
        ("lengths=[]", "lengths is empty; give at least one"),
        ("lengths=[0]", "lengths has 0; all must be at least 1"),
        ("lengths=[100]", "train.tokens_per_step is 128 and no multiple of train.sequence_length 100; the next that"),
        ("train.sequence_length=64", "lengths and train.sequence_length are both given; leave one of them out"),
        ("variants=[auto]", "variants has auto; allowed are standard, flash_v1, flash_v2,"),
        ("peers=[gpt]", "peers has gpt; write MODULE:FUNCTION, as in my_trainer:gpt2"),
        ("peers=[no_such:gpt]", "peers has no_such:gpt, and no_such cannot be imported (ModuleNotFoundError("),
        ("relative_to=flex", "relative_to is flex; it must be one of the variants: sdpa_math, sdpa_cudnn"),
        ("warmup=-1", "warmup is -1; it must be at least 0"),
        ("steps=0", "steps is 0; it must be at least 1"),
        ("rounds=0", "rounds is 0; it must be at least 1"),
        ("model.positions=learned", "model.positions=learned needs model.max_positions, the longest sequence"),
        ("model.num_heads=3", "model.hidden_size=32 is not divisible by model.num_heads=3"),
        ("model.vocab_size=100", "model.vocab_size is 100 and tokenizer bytes has 257 tokens"),
        ("attention=flash_v2", "attention is not for this command, whose own settings are lengths, variants, peers,"),
        ("train.steps=3", "train.steps is not for this command, whose own settings are lengths, variants,"),
        ("data.cache_dir=corpora", "data.cache_dir is not for this command, whose own settings are lengths,"),
        ("data=recall", "data is not for this command, whose own settings are lengths,"),
        ("resume=runs/first", "resume is not for this command, whose own settings are lengths,"),
        ("trainer.devices=2", "trainer.devices is 2 and one is measured; leave it out"),
        ("trainer.profile_steps=[1,2]", "trainer.profile_steps is for a run and its logs; leave it out"),
        ("data.isolate_documents=true", "data.isolate_documents=true is for text and random tokens are trained on;"),
        ("seed=-1", "seed is -1; it must be at least 0 and below 4294967296"),
        ("output=", "output is empty; name a new folder, or leave it out for runs/ with the time"),
        ("output=taken", "output=taken exists; name another"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_a_mistake_ends_in_one_sentence(tmp_path, override, sentence):
    (tmp_path / "taken").mkdir()
    assert mistake(override).startswith(sentence)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_learned_positions_must_reach_every_length():
    assert mistake("model.positions=learned", "model.max_positions=32") == (
        "train.sequence_length is 64 and the model's learned positions end at 32; lower it, or say model.positions=rope"
    )


def test_the_defaults_are_all_variants_at_the_length_of_a_run():
    from flashtrain import bench_training
    from flashtrain.entry import main

    received = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["bench_training.py"])
        main(received.append, bench_training.ROOT)
    ((config,),) = received
    assert config.train.sequence_length == 256 and config.variant_names == list(VARIANTS)
    assert (config.warmup, config.steps, config.rounds, config.train.steps) == (2, 8, 5, 10)
