"""The multipack plugin: what it refuses, what it hands out, and what it says in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import DataLoader
from transformers import LlamaConfig, MixtralConfig, TrainingArguments

from tests.acceleration.test_plugin import facts
from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.plugins import BUILTIN
from tuning.acceleration.plugins.multipack import MultiPackPlugin, TruncatingCollator, shape_of
from tuning.config.acceleration_configs import MultiPack
from tuning.data import cost
from tuning.data.collators import FlattenedCollator
from tuning.errors import ConfigError, DataError, PluginError

LLAMA = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50,
)  # fmt: skip


def arguments(**values):
    known = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "data_seed": None,
        "max_steps": -1,
        "num_train_epochs": 3.0,
        "ddp_timeout": 1800,
    }
    return SimpleNamespace(**{**known, **values})


def told(*, world_size=2, rank=0, model_config=LLAMA, peft_config=None, **values):
    return facts(
        model_config=model_config,
        train_args=arguments(**values),
        world_size=world_size,
        rank=rank,
        seed=3,
        peft_config=peft_config,
    )


def refusals(config, known) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        MultiPackPlugin(config).check(known)
    return list(caught.value.problems)


# ---- what is refused ----


def test_plain_arguments_are_fine(tmp_path):
    plugin = MultiPackPlugin(MultiPack())
    assert plugin.check(told()) is None
    real = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert plugin.check(facts(model_config=LLAMA, train_args=real)) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "--multipack and --train_sampling_strategy batch_rebalance both choose the samples of a batch; drop one of "
            "them",
        ),
        (
            {"group_by_length": True},
            "--multipack and --train_sampling_strategy group_by_length both choose the samples of a batch; drop one of "
            "them",
        ),
        (
            {"packing": True},
            "--multipack and --packing both put samples together; drop --packing (--multipack mode=budget makes full "
            "packs)",
        ),
        (
            {"auto_find_batch_size": True},
            "--auto_find_batch_size changes the batch size during the run, while the plan of --multipack is made for "
            "one; drop --auto_find_batch_size or --multipack",
        ),
        (
            {"dataloader_drop_last": True},
            "--dataloader_drop_last drops samples, while --multipack keeps every one; drop --dataloader_drop_last or "
            "--multipack",
        ),
        (
            {"accelerator_config": SimpleNamespace(split_batches=True)},
            "accelerator_config asks for split_batches, but --multipack gives each rank batches of its own; drop "
            "split_batches or --multipack",
        ),
        (
            {"accelerator_config": SimpleNamespace(dispatch_batches=True)},
            "accelerator_config asks for dispatch_batches, but --multipack gives each rank batches of its own; drop "
            "dispatch_batches or --multipack",
        ),
        (
            {"accelerator_config": SimpleNamespace(use_seedable_sampler=False)},
            "--multipack mode=exact follows the order of accelerate's seedable sampler, which accelerator_config "
            "use_seedable_sampler=false turns off; leave it on, or use mode=budget",
        ),
        (
            {"n_gpu": 4},
            "--multipack needs one process a GPU, and this one has 4; start it with accelerate launch or torchrun, or "
            "set CUDA_VISIBLE_DEVICES to one GPU",
        ),
    ],
)
def test_arguments_that_cannot_be_kept(values, text):
    assert refusals(MultiPack(), told(**values)) == [text]


@pytest.mark.parametrize(
    ("options", "values", "text"),
    [
        (
            {"max_tokens": 0},
            {},
            "--multipack max_tokens=0 is no number of tokens; give 1 or more, or leave it out",
        ),
        (
            {"over_long": "drop"},
            {},
            "--multipack over_long=drop needs max_tokens, without which no sample is too long in mode=exact; add "
            "max_tokens, or drop over_long",
        ),
        (
            {"over_long": "truncate", "mode": "budget"},
            {"eval_strategy": "steps"},
            "--multipack over_long=truncate would cut the evaluation samples too; use --max_seq_length to cut both, "
            "over_long=own_step or drop, or --eval_strategy no",
        ),
    ],
)
def test_options_that_cannot_be_kept(options, values, text):
    assert refusals(MultiPack(**options), told(**values)) == [text]


def test_every_refusal_is_told_at_once():
    config = LlamaConfig(vocab_size=0)
    problems = refusals(
        MultiPack(max_tokens=-1), told(model_config=config, packing=True, train_sampling_strategy="sequential")
    )
    assert len(problems) == 4
    assert problems[3] == (
        "--multipack cost=model needs the number of vocab of the model, and its config.json has none; use --multipack "
        "cost=tokens"
    )
    assert MultiPackPlugin(MultiPack(cost="tokens")).check(told(model_config=config)) is None


def test_it_needs_padding_free():
    with pytest.raises(ConfigError) as caught:
        AccelerationFramework({"multipack": MultiPack()}, plugins=BUILTIN)
    assert str(caught.value) == (
        "--multipack needs --padding_free, which is off; add --padding_free or drop --multipack"
    )


# ---- what it hands out ----


def test_the_shape_of_a_model():
    assert shape_of(told()) == {
        "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 32, "vocab": 50,
        "experts_per_token": None, "expert_intermediate": 32, "shared_intermediate": None, "trainable": "full",
    }  # fmt: skip
    assert shape_of(told(peft_config=object()))["trainable"] == "lora"
    experts = shape_of(told(model_config=MixtralConfig(intermediate_size=24, num_experts_per_tok=2)))
    assert (experts["experts_per_token"], experts["expert_intermediate"]) == (2, 24)
    shared = SimpleNamespace(n_shared_experts=2, moe_intermediate_size=7)
    other = facts(model_config=SimpleNamespace(get_text_config=lambda: shared))
    assert shape_of(other)["shared_intermediate"] == 14


def test_what_the_run_says_becomes_the_spec():
    plugin = MultiPackPlugin(MultiPack())
    sampler = plugin.batch_sampler([5, 4, 3, 2, 1], told(rank=1, gradient_accumulation_steps=2, data_seed=9))
    spec = sampler.spec
    assert (spec.mode, spec.num_ranks, spec.batch_size, spec.accumulation, spec.seed) == ("exact", 2, 2, 2, 9)
    assert spec.max_tokens is None
    assert spec.cost == cost.from_shape(shape_of(told()))
    assert (sampler.rank, sampler.replan, sampler.rows) == (1, False, None)
    budget = MultiPackPlugin(MultiPack(mode="budget", cost="tokens", resume="replan")).batch_sampler([5, 4, 3], told())
    # without data_seed the run's seed; two samples of mean length
    assert (budget.spec.seed, budget.spec.max_tokens, budget.replan) == (3, 8, True)
    assert budget.spec.cost == cost.TOKENS


def test_all_ranks_share_an_epoch():
    seen = []
    for rank in range(3):
        sampler = MultiPackPlugin(MultiPack(mode="budget")).batch_sampler(range(1, 40), told(world_size=3, rank=rank))
        seen += [sample for batch in sampler for sample in batch]
    assert sorted(seen) == list(range(39))


def test_no_sample_at_all():
    with pytest.raises(DataError) as caught:
        MultiPackPlugin(MultiPack()).batch_sampler([], told())
    assert str(caught.value) == "there is no sample to train on; see the data table for why rows were dropped"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"max_tokens": 10},
            "--multipack mode=exact max_tokens=10: row 2 of the training data has 14 tokens and its step must hold it, "
            "and 1 more rows are too long (longest 20). Raise max_tokens to 20, shorten samples with --max_seq_length "
            "10, or choose over_long=truncate or over_long=drop",
        ),
        (
            {"max_tokens": 15, "mode": "budget", "over_long": "error"},
            "--multipack mode=budget max_tokens=15: row 3 of the training data has 20 tokens and over_long=error was "
            "asked for. Raise max_tokens to 20, shorten samples with --max_seq_length 15, or choose over_long=truncate "
            "or over_long=drop",
        ),
        (
            {"max_tokens": 1, "mode": "budget", "over_long": "drop"},
            "--multipack over_long=drop drops every sample: 4 of 4 samples are longer than max_tokens=1 (longest 20); "
            "raise max_tokens or choose another policy",
        ),
    ],
)
def test_long_samples_that_stop_the_run(options, text):
    with pytest.raises(DataError) as caught:
        MultiPackPlugin(MultiPack(**options)).batch_sampler([2, 3, 14, 20], told())
    assert str(caught.value) == text


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_dropped_samples_are_counted_and_gone(mode, caplog):
    caplog.set_level(logging.INFO, "tuning")
    plugin = MultiPackPlugin(MultiPack(mode=mode, max_tokens=10, over_long="drop"))
    sampler = plugin.batch_sampler([2, 3, 14, 5, 20], told(world_size=1))
    assert sorted(sample for batch in sampler for sample in batch) == [0, 1, 3]
    assert (
        "multipack: 2 of 5 samples are longer than max_tokens=10 (longest 20) and are dropped; first: row 2"
        in caplog.messages
    )


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_truncated_samples_are_cut_and_counted(mode, caplog):
    caplog.set_level(logging.INFO, "tuning")
    plugin = MultiPackPlugin(MultiPack(mode=mode, max_tokens=10, over_long="truncate"))
    collator = plugin.collator(FlattenedCollator(), told())
    assert isinstance(collator, TruncatingCollator)
    rows = [{"input_ids": list(range(size)), "labels": list(range(size))} for size in (2, 14)]
    assert collator(rows)["input_ids"].shape == (1, 16)
    sampler = plugin.batch_sampler([2, 14], told(world_size=1, per_device_train_batch_size=1))
    assert collator(rows)["input_ids"].tolist() == [[0, 1, *range(10)]]
    assert collator(rows)["labels"].tolist() == [[-100, 1, -100, *range(1, 10)]]
    # a filler seat stays one
    assert (collator([])["labels"] == -100).all()
    assert sampler.plan(0).seat_tokens.sum() == 12
    assert (
        "multipack: 1 of 2 samples are longer than max_tokens=10 (longest 14) and lose their last 4 tokens together; "
        "one whose answer lies beyond the cut trains on nothing" in caplog.messages
    )


def test_long_samples_of_a_budget_get_a_micro_step_and_are_counted(caplog):
    caplog.set_level(logging.INFO, "tuning")
    plugin = MultiPackPlugin(MultiPack(mode="budget", max_tokens=10))
    assert plugin.collator(FlattenedCollator(), told()) is None
    sampler = plugin.batch_sampler([20, *[5] * 8], told())
    assert sampler.plan(0).seat_tokens.max() == 20
    assert (
        "multipack: 1 of 9 samples are longer than max_tokens=10 (longest 20): each gets a micro-step of its own, in "
        "which the other ranks are filled up to its length" in caplog.messages
    )


def test_a_cap_that_a_later_epoch_breaks_is_told_before_training():
    # the two long samples meet in a step of some epochs only
    lengths = [9, 9, 1, 1]
    broken = []
    for seed in range(6):
        known = told(world_size=1, data_seed=seed)
        plugin = MultiPackPlugin(MultiPack(max_tokens=10))
        try:
            plugin.batch_sampler(lengths, known)
        except DataError as error:
            broken.append(str(error))
    assert any("of epoch 1 holds 18 tokens" in text or "of epoch 2 holds 18 tokens" in text for text in broken)
    # as many epochs as the steps of the run need
    one_epoch = told(world_size=1, data_seed=0, max_steps=2)
    counted = []
    plugin = MultiPackPlugin(MultiPack(max_tokens=18))
    plugin.batch_sampler(lengths, one_epoch)
    counted.append(plugin.callbacks()[0].sampler.num_steps)
    assert counted == [2]


# ---- what it says ----


def test_the_plan_is_reported(caplog):
    caplog.set_level(logging.INFO, "tuning")
    MultiPackPlugin(MultiPack(mode="budget", max_tokens=8, cost="tokens")).batch_sampler([4] * 16, told())
    head, advice = caplog.messages
    assert head.startswith("multipack: 16 samples for 2 ranks planned in 0.0")
    assert head.endswith(
        "s, each rank for itself, once an epoch: 4 optimizer steps an epoch (4 without --multipack) of 4 to 4 samples, "
        "fill 1.000, token balance 1.000, cost balance 1.000 (at most 1.000)"
    )
    assert advice == (
        "multipack: num_processes=16 is how many processes measure lengths of data that does not know them, as far as "
        "there are cores; it changes no batch. If a rank times out while another still prepares data, raise it or "
        "raise --ddp_timeout (now 1800 s)"
    )


def test_a_low_bound_comes_with_advice(caplog):
    caplog.set_level(logging.INFO, "tuning")
    lengths = [100, 1, 1, 1] * 4
    MultiPackPlugin(MultiPack(cost="tokens")).batch_sampler(lengths, told())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    bound = MultiPackPlugin(MultiPack(cost="tokens")).batch_sampler(lengths, told()).plan(0).stats().bound
    assert warnings == [
        f"multipack: no seating can keep the ranks busier than {100 * bound:.0f} % of the time, because the longest "
        "sample of a step outlasts the others' share. Raise gradient_accumulation_steps and lower "
        "per_device_train_batch_size by the same factor, which keeps the steps, or use mode=budget"
    ]
    caplog.clear()
    MultiPackPlugin(MultiPack(cost="tokens")).batch_sampler(lengths, told(world_size=1))
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_ranks_without_a_sample_are_told(caplog):
    caplog.set_level(logging.INFO, "tuning")
    MultiPackPlugin(MultiPack()).batch_sampler([7, 7, 7], told(world_size=4, per_device_train_batch_size=1))
    assert next(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING) == (
        "multipack: 1 of 4 seats an epoch have no sample (3 samples, 4 ranks); a filler without a label stands in and "
        "adds nothing"
    )


# ---- the guard ----


def test_a_loader_sharded_a_second_time_stops_the_run():
    plugin = MultiPackPlugin(MultiPack())
    assert plugin.callbacks() == ()
    sampler = plugin.batch_sampler([4] * 16, told())
    (guard,) = plugin.callbacks()
    rows = np.arange(16)
    assert guard.on_train_begin(None, None, None, train_dataloader=DataLoader(rows, batch_sampler=sampler)) is None
    assert guard.on_train_begin(None, None, None) is None
    from accelerate.data_loader import BatchSamplerShard

    again = DataLoader(rows, batch_sampler=BatchSamplerShard(sampler, num_processes=2, process_index=0))
    with pytest.raises(PluginError) as caught:
        guard.on_train_begin(None, None, None, train_dataloader=again)
    assert str(caught.value) == (
        "--multipack planned 4 batches for this rank, but the trainer's loader has 2: it was sharded a second time, "
        "and samples would be lost. Hand the loader to the trainer as it is, without accelerator.prepare"
    )
