"""What upstream refuses is one message: the flag, why not, what to do. Nothing is written before it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import build_bigram
from tests.trainers.harness import EIGHT_GOOD, TWO_BAD, make_trainer
from tuning.errors import CheckpointError, ConfigError
from tuning.trainers import refusals

ROWS = [TWO_BAD, EIGHT_GOOD]


def refused(tmp_path, **values):
    """Return the text of the refusal, and whether the trainer was made before it."""
    made = []

    def run():
        made.append(make_trainer(tmp_path / "out", build_bigram(), ROWS, **values))
        made[0].train()

    with pytest.raises(ConfigError) as caught:
        run()
    assert not list(tmp_path.glob("out/*"))
    return str(caught.value), bool(made)


def test_an_optimizer_whose_package_is_not_installed(tmp_path):
    text, _ = refused(tmp_path, optim="stable_adamw")
    assert text == (
        "--optim stable_adamw cannot be used: You need to install `torch-optimi` in order to use stable_adamw "
        "optimizers. Install it with `pip install torch-optimi`; mend that or choose another --optim"
    )


def test_options_of_an_optimizer_that_cannot_be_read(tmp_path):
    text, _ = refused(tmp_path, optim="sgd", optim_args="momentum")
    assert text == (
        "--optim sgd with --optim_args momentum cannot be used: not enough values to unpack (expected 2, got 1); mend "
        "that or choose another --optim"
    )


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [("sgd", "speed=1"), ("sgd", "momentum=0.9,speed=1"), ("adamw_torch", "eps=0.5"), ("adafactor", "decay_rate=0")],
)
def test_options_that_an_optimizer_does_nothing_with(tmp_path, optim, optim_args):
    text, _ = refused(tmp_path, optim=optim, optim_args=optim_args)
    assert text.startswith(f"--optim_args {optim_args.split(',')[-1]} does nothing with --optim {optim}: ")


def test_the_full_text_of_an_option_that_does_nothing():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError) as caught:
        refusals.check_optimizer_options(optimizer, "sgd", "speed=1")
    known = ", ".join(sorted(optimizer.defaults))
    assert str(caught.value) == (
        "--optim_args speed=1 does nothing with --optim sgd: SGD was made without it. Its options are "
        f"{known}; some have flags of their own, such as --weight_decay. Drop the entry"
    )


def test_options_that_an_optimizer_takes(tmp_path):
    trainer = make_trainer(
        tmp_path, build_bigram(), ROWS, optim="sgd", optim_args="momentum=0.9, nesterov=true", max_steps=1
    )
    trainer.train()
    # the accelerator wraps it
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.9
    assert trainer.optimizer.param_groups[0]["nesterov"] is True


@pytest.mark.parametrize(
    ("schedule", "options", "why"),
    [
        ("warmup_stable_decay", None, "get_wsd_schedule() missing 1 required positional argument: 'num_decay_steps'"),
        ("cosine", {"speed": 2}, "get_cosine_schedule_with_warmup() got an unexpected keyword argument 'speed'"),
    ],
)
def test_a_schedule_without_its_options_or_with_others(tmp_path, schedule, options, why):
    text, _ = refused(tmp_path, lr_scheduler_type=schedule, lr_scheduler_kwargs=options, max_steps=2)
    assert text == (
        f"--lr_scheduler_type {schedule} does not go with --lr_scheduler_kwargs {options or '{}'}: {why}; correct the "
        "options"
    )


def test_a_metric_that_no_evaluation_reports(tmp_path):
    text, made = refused(tmp_path, eval_strategy="steps", metric_for_best_model="bleu", eval_rows=ROWS)
    assert not made
    assert text == (
        "--metric_for_best_model is bleu, which evaluations do not report; name one of loss, mean_token_accuracy, "
        "entropy, num_tokens, runtime, samples_per_second, steps_per_second"
    )


@pytest.mark.parametrize("metric", ["loss", "eval_mean_token_accuracy"])
def test_metrics_that_evaluations_report(tmp_path, metric):
    trainer = make_trainer(
        tmp_path, build_bigram(), ROWS, eval_rows=ROWS, eval_strategy="steps", eval_steps=1, save_strategy="best",
        metric_for_best_model=metric, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_what_the_constructors_of_upstream_refuse(tmp_path):
    text, made = refused(tmp_path, router_aux_loss_coef=0.1)
    assert not made
    assert text == (
        "The trainer refuses these arguments: `router_aux_loss_coef` is set to 0.1 but LlamaForCausalLM is not a "
        "Mixture-of-Experts model that returns its router logits, so there is no auxiliary loss to weight"
    )


def test_a_loss_that_is_no_number_is_told_once(tmp_path, caplog):
    model = build_bigram()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    trainer = make_trainer(tmp_path, model, ROWS, max_steps=2)
    trainer.train()
    told = [record.getMessage() for record in caplog.records if "no finite numbers" in record.getMessage()]
    assert told == [
        "the loss is nan up to step 1: weights are, or became, no finite numbers; lower --learning_rate, use "
        "--torch_dtype float32 or bfloat16, or look at the checkpoint"
    ]


def test_our_own_errors_pass_and_others_too():
    def say(why):
        return CheckpointError(f"told: {why}")

    with pytest.raises(ConfigError, match="ours"), refusals.told(say, Exception):
        raise ConfigError("ours")
    with pytest.raises(KeyError), refusals.told(say, ValueError):
        raise KeyError("a fault of ours")
    with pytest.raises(CheckpointError) as caught, refusals.told(say, ValueError):
        raise ValueError("first.\nsecond")
    assert str(caught.value) == "told: first"
    with pytest.raises(CheckpointError) as caught, refusals.told(say, ValueError):
        raise ValueError
    assert str(caught.value) == "told: ValueError"
