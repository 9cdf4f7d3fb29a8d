"""One run to its end: files, summary, resume, and a model that shows no trace of it."""

from __future__ import annotations

import json
import logging

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.tiny import build_bigram, build_model, build_tokenizer
from tests.trainers.harness import EIGHT_GOOD, TWO_BAD, losses, make_trainer
from tuning.data import cost
from tuning.data.packing import PackingSpec
from tuning.data.sampler import MultiPackSampler
from tuning.errors import CheckpointError
from tuning.trainers.fit import fit, restored

# peft asks for the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROWS = [[20, 21, 22, 23, 24], TWO_BAD, EIGHT_GOOD, [40, 41], [50, 52, 54, 56], [7, 8, 9]] * 2
IDS = torch.tensor([[1, 20, 21, 40, 2, 9]])


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@torch.no_grad()
def logits(model, ids=IDS) -> torch.Tensor:
    return model(input_ids=ids).logits


def build_lora(model=None, **values):
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.0, **values)
    return peft.get_peft_model(model or build_model(), config)


class StopAt(TrainerCallback):
    """Ends training after a step, as a job that is killed between two steps."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


# ---- what a run leaves on disk ----


def test_a_run_saves_an_ordinary_checkpoint(tmp_path):
    model = build_model()
    with restored(model):
        fit(make_trainer(tmp_path, model, ROWS), None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert same(weights(loaded), weights(model))
    assert torch.equal(logits(loaded), logits(model))
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(build_tokenizer())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == build_tokenizer().chat_template
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["use_cache"] is True
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == len(ROWS)
    assert not (tmp_path / "added_tokens_info.json").exists()


def test_the_model_may_go_elsewhere(tmp_path):
    model = build_model()
    with restored(model):
        fit(make_trainer(tmp_path / "run", model, ROWS, save_model_dir=str(tmp_path / "model")), None)
    assert same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), weights(model))
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_added_tokens_are_told_beside_each_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, build_model(), ROWS, save_strategy="steps", save_steps=6)
    trainer.processing_class.add_tokens(["<a>", "<b>"], special_tokens=True)
    fit(trainer, None, added_tokens=("<a>", "<b>"))
    for folder in (tmp_path, tmp_path / "checkpoint-6", tmp_path / "checkpoint-12"):
        info = json.loads((folder / "added_tokens_info.json").read_text())
        assert info == {"num_new_tokens": 2, "added_tokens": {"<a>": 266, "<b>": 267}}


def test_the_log_file_and_the_summary(tmp_path, caplog):
    trainer = make_trainer(
        tmp_path,
        build_bigram(),
        [TWO_BAD, EIGHT_GOOD, TWO_BAD],
        eval_rows=[EIGHT_GOOD],
        per_device_train_batch_size=2,
        learning_rate=0.0,
        eval_strategy="epoch",
    )
    with caplog.at_level(logging.INFO, logger="tuning"):
        metrics = fit(trainer, None)
    assert metrics["train_real_tokens"] == 15
    assert metrics["train_supervised_tokens"] == 12
    assert metrics["train_padding_share"] == pytest.approx(6 / 21)
    assert metrics["train_tokens_per_second"] > 0
    assert metrics["train_loss"] == pytest.approx((1.567273 + 4.767273) / 2, abs=1e-5)
    (text,) = [message for message in caplog.messages if message.startswith("finished")]
    lines = [line.split("  ", 1) for line in text.splitlines()[1:]]
    table = {key: value.strip() for key, value in lines}
    assert list(table) == [
        "optimizer steps",
        "real tokens",
        "supervised tokens",
        "padding computed",
        "real tokens/s",
        "first logged loss",
        "last logged loss",
        "last evaluation loss",
        "model",
    ]
    assert table["optimizer steps"] == "2"
    assert table["real tokens"] == "15"
    assert table["supervised tokens"] == "12"
    assert table["padding computed"] == "28.6 %"
    assert table["first logged loss"] == "1.5673"
    assert table["last logged loss"] == "4.7673"
    assert table["last evaluation loss"] == "0.7673"
    assert table["model"] == str(tmp_path)
    names = [json.loads(line)["name"] for line in (tmp_path / "training_logs.jsonl").read_text().splitlines()]
    assert names.count("training_loss") == 2
    assert names.count("validation_loss") == 1
    assert names.count("training_meters") == 2


# ---- meters ----


def test_meters_of_each_line(tmp_path):
    # rows of 3 and 9 tokens side by side compute 18 slots, 12 of them real; labels of the first 2 tokens masked
    masked = (EIGHT_GOOD, [-100, -100, *EIGHT_GOOD[2:]])
    trainer = make_trainer(
        tmp_path, build_bigram(), [TWO_BAD, masked, EIGHT_GOOD, EIGHT_GOOD], per_device_train_batch_size=2
    )
    fit(trainer, None)
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["num_tokens"] for line in lines] == [12, 30]
    assert [line["supervised_tokens"] for line in lines] == [2 + 7, 9 + 16]
    assert [line["padding_share"] for line in lines] == [pytest.approx(6 / 18, abs=1e-4), 0.0]
    assert lines[0]["mean_token_accuracy"] == pytest.approx(7 / 9)
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert all("peak_memory_gib" not in line for line in lines)


def test_totals_go_on_after_a_resume_and_are_those_of_an_unbroken_run(tmp_path):
    values = {"save_strategy": "steps", "save_steps": 5, "logging_steps": 3}
    whole = make_trainer(tmp_path / "whole", build_bigram(), ROWS, **values)
    expected = fit(whole, None)
    broken = make_trainer(tmp_path / "broken", build_bigram(), ROWS, seats={"callbacks": (StopAt(7),)}, **values)
    fit(broken, None)
    again = make_trainer(tmp_path / "broken", build_bigram(), ROWS, **values)
    metrics = fit(again, str(tmp_path / "broken" / "checkpoint-5"))
    for key in ("train_real_tokens", "train_supervised_tokens", "train_padding_share"):
        assert metrics[key] == expected[key]
    assert expected["train_real_tokens"] == sum(map(len, ROWS))

    def lines(trainer, key):
        return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}

    for key in ("num_tokens", "supervised_tokens"):
        assert lines(again, key) == lines(whole, key)
    # the speed counts the tokens of this process alone
    assert again.resumed_tokens == sum(map(len, ROWS[:5]))


# ---- resume ----


@pytest.mark.parametrize(("build", "step"), [(build_model, 4), (build_model, 6), (build_model, 8), (build_lora, 4)])
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path, build, step):
    # two epochs of 6 steps in random order
    values = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "random",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = build()
    fit(make_trainer(tmp_path / "whole", whole, ROWS, **values), None)
    fit(make_trainer(tmp_path / "b", build(), ROWS, seats={"callbacks": (StopAt(step),)}, **values), None)
    resumed = build()
    trainer = make_trainer(tmp_path / "b", resumed, ROWS, **values)
    fit(trainer, str(tmp_path / "b" / f"checkpoint-{step}"))
    assert trainer.state.global_step == 12
    assert same(weights(whole), weights(resumed))
    assert not same(weights(whole), weights(build()))


def test_a_checkpoint_of_another_trainer(tmp_path, caplog):
    values = {"save_strategy": "steps", "save_steps": 5}
    fit(make_trainer(tmp_path, build_bigram(), ROWS, **values), None)
    (tmp_path / "checkpoint-5" / "packtune_state.json").unlink()
    with caplog.at_level(logging.WARNING, logger="tuning"):
        metrics = fit(make_trainer(tmp_path, build_bigram(), ROWS, **values), str(tmp_path / "checkpoint-5"))
    assert caplog.messages == [f"{tmp_path}/checkpoint-5 was written by another trainer: token counts start from zero"]
    assert metrics["train_real_tokens"] == sum(map(len, ROWS[5:]))


class Sampler:
    """One row a batch, in order, with a state."""

    def __init__(self, rows):
        self.rows = rows
        self.epochs = []
        self.loaded = None

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter([[row] for row in range(self.rows)])

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.loaded = state


def test_a_batch_sampler_is_told_its_epoch_and_its_state(tmp_path):
    values = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    first = Sampler(4)
    fit(make_trainer(tmp_path, build_bigram(), ROWS[:4], seats={"batch_sampler": first}, **values), None)
    assert first.epochs == [0, 1]
    second = Sampler(4)
    trainer = make_trainer(tmp_path, build_bigram(), ROWS[:4], seats={"batch_sampler": second}, **values)
    fit(trainer, str(tmp_path / "checkpoint-6"))
    assert second.loaded == {"epochs": [0, 1]}
    assert set(second.epochs) == {1}
    assert trainer.state.global_step == 8


def test_other_flags_than_those_of_the_checkpoint(tmp_path):
    values = {"save_strategy": "steps", "save_steps": 3}
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    fit(make_trainer(plain, build_bigram(), ROWS[:4], **values), None)
    fit(make_trainer(packed, build_bigram(), ROWS[:4], seats={"batch_sampler": Sampler(4)}, **values), None)
    with pytest.raises(CheckpointError) as caught:
        fit(make_trainer(packed, build_bigram(), ROWS[:4], **values), str(packed / "checkpoint-3"))
    advice = "so its batches would not go on where they stopped; use the same flags, or pass "
    assert str(caught.value) == (
        f"{packed}/checkpoint-3 was written with --multipack and this run is without it, {advice}"
        "--resume_from_checkpoint false"
    )
    trainer = make_trainer(plain, build_bigram(), ROWS[:4], seats={"batch_sampler": Sampler(4)}, **values)
    with pytest.raises(CheckpointError) as caught:
        fit(trainer, str(plain / "checkpoint-3"))
    assert str(caught.value) == (
        f"{plain}/checkpoint-3 was written without --multipack and this run is with it, {advice}"
        "--resume_from_checkpoint false"
    )


def planned(accumulation) -> MultiPackSampler:
    spec = PackingSpec(
        mode="budget", num_ranks=1, batch_size=2, accumulation=accumulation, seed=3, cost=cost.TOKENS, max_tokens=12
    )
    return MultiPackSampler([len(row) for row in ROWS], spec, rank=0)


def test_a_planned_run_can_be_resumed_at_any_step(tmp_path):
    values = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "collator": "flattened"}
    whole = build_model()
    trainer = make_trainer(
        tmp_path / "whole",
        whole,
        ROWS,
        seats={"batch_sampler": planned(2)},
        save_strategy="steps",
        save_steps=1,
        **values,
    )
    expected = fit(trainer, None)
    assert trainer.state.global_step == 9
    for step in (2, 3, 4):  # within an epoch, at its end, at the start of the next
        resumed = build_model()
        again = make_trainer(tmp_path / str(step), resumed, ROWS, seats={"batch_sampler": planned(2)}, **values)
        metrics = fit(again, str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert again.state.global_step == 9
        assert same(weights(whole), weights(resumed)), step
        assert metrics["train_real_tokens"] == expected["train_real_tokens"] == 3 * sum(map(len, ROWS))


# ---- no trace ----

UPSTREAM = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": "true"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "bf16": {"bf16": True},
}


def picture(model) -> dict[str, object]:
    """Return everything on every module but its mode: attributes by name, and how many hooks.

    The token ids of its configs are left out: the trainer sets them to the tokenizer's on purpose.
    """
    registries = ("_parameters", "_buffers", "_modules")
    return {
        f"{name}.{key}": sorted(value) if key in registries else len(value) if key.endswith("_hooks") else repr(value)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in ("training", "config", "generation_config")
    }


@pytest.mark.parametrize("values", UPSTREAM.values(), ids=UPSTREAM)
@pytest.mark.parametrize("build", [build_model, build_lora], ids=["full", "lora"])
@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_a_run_leaves_no_trace_on_the_model(tmp_path, values, build, raises):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if raises:
                raise ZeroDivisionError

    model = build()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "float32"
    before = picture(model)
    try:
        with restored(model):
            trainer = make_trainer(tmp_path, model, ROWS[:3], seats={"callbacks": (Break(),)}, **values)
            fit(trainer, None)
    except ZeroDivisionError:
        assert raises
    assert picture(model) == before
    assert not model.training
    # inference is that of the same weights without a run
    fresh = build()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh.eval()), logits(model))


def test_the_picture_shows_what_a_run_leaves_without_care(tmp_path):
    model = build_model()
    before = picture(model)
    fit(make_trainer(tmp_path, model, ROWS[:3], gradient_checkpointing="true"), None)
    changed = {key.rpartition(".")[2] for key in picture(model).keys() ^ before.keys()}
    assert {"forward", "_is_accelerate_prepared", "_gradient_checkpointing_func"} <= changed


def test_two_runs_in_one_process_are_the_same_run(tmp_path):
    ends = []
    for number in range(2):
        model = build_model()
        with restored(model):
            trainer = make_trainer(tmp_path / str(number), model, ROWS, train_sampling_strategy="random")
            fit(trainer, None)
        ends.append((losses(trainer), weights(model)))
        if not number:
            # another precision in between must not stay
            other = build_model()
            with restored(other):
                fit(make_trainer(tmp_path / "bf16", other, ROWS, bf16=True), None)
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])


def test_a_model_can_be_trained_twice(tmp_path):
    model = build_model()
    for number in range(2):
        with restored(model):
            trainer = make_trainer(tmp_path / str(number), model, ROWS, learning_rate=1e-2)
            fit(trainer, None)
        if not number:
            first = losses(trainer)
    assert sum(losses(trainer)) < sum(first)
