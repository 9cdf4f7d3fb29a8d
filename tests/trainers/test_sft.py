"""The trainer: an exact loss a supervised token, whatever the batches, and no wait between log lines.

Targets cost a known amount in the bigram model: 0.767273 where the next id is this id plus one, 4.767273 elsewhere.
Public reports of the faults these tests keep out: https://github.com/huggingface/transformers/pull/34191 (means of
means), https://github.com/huggingface/transformers/pull/38872 (short last window),
https://github.com/linkedin/Liger-Kernel/issues/177 (no target), https://github.com/linkedin/Liger-Kernel/issues/243
(smoothing dropped).
"""

from __future__ import annotations

import itertools
import logging
import math
import pathlib
import traceback
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    EarlyStoppingCallback,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)

from tests.tiny import build_bigram, build_model, build_tokenizer
from tests.trainers.harness import BAD, COLLATORS, EIGHT_GOOD, GOOD, TWO_BAD, KeepGradients, losses, make_trainer
from tuning.attention.switch import switched
from tuning.errors import CheckpointError, ConfigError
from tuning.seats import LossTerms

MASKED = ([10, 11], [-100, -100])
MEAN = (2 * BAD + 8 * GOOD) / 10  # 1.567273, a mean of means would be 2.767273
RAGGED = [[20, 21], [30, 31, 32, 40], TWO_BAD, [5], EIGHT_GOOD, [50, 52, 53], [8, 9, 10]]

layouts = pytest.mark.parametrize("collator", COLLATORS)


# ---- the mean a token ----


@layouts
def test_accumulation_gives_the_mean_a_token(tmp_path, collator):
    trainer = make_trainer(
        tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], collator=collator, gradient_accumulation_steps=2
    )
    trainer.train()
    assert losses(trainer) == pytest.approx([1.567273], abs=1e-5)


@layouts
def test_a_short_last_window_is_divided_by_its_own_tokens(tmp_path, collator):
    trainer = make_trainer(
        tmp_path, build_bigram(), [EIGHT_GOOD] * 5, collator=collator, gradient_accumulation_steps=4, learning_rate=0.0
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert losses(trainer) == pytest.approx([0.767273, 0.767273], abs=1e-5)


@layouts
def test_gradients_are_those_of_one_batch(tmp_path, collator):
    kept = {}
    for name, values in {
        "accumulated": {"gradient_accumulation_steps": 2},
        "batch": {"per_device_train_batch_size": 2},
    }.items():
        trainer = make_trainer(
            tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], collator=collator, max_grad_norm=0.0, **values
        )
        kept[name] = KeepGradients(["lm_head.weight", "model.embed_tokens.weight"]).attach(trainer)
        trainer.train()
    (accumulated,), (batch,) = kept["accumulated"].steps, kept["batch"].steps
    for name, gradient in batch.items():
        assert gradient.norm() > 1e-3
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-7)


class Refusing(LlamaForCausalLM):
    """Takes no loss keyword, so that transformers averages each micro-batch by itself."""

    accepts_loss_kwargs = False
    loss_type = "unheard of"  # and does not know that its loss shifts labels

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache)


def test_a_model_class_that_takes_no_loss_keywords(tmp_path):
    plain = build_bigram()
    model = Refusing(plain.config)
    model.load_state_dict(plain.state_dict())
    trainer = make_trainer(tmp_path, model, [TWO_BAD, EIGHT_GOOD], gradient_accumulation_steps=2, max_grad_norm=0.0)
    kept = KeepGradients(["lm_head.weight"]).attach(trainer)
    trainer.train()
    assert losses(trainer) == pytest.approx([1.567273], abs=1e-5)
    reference = make_trainer(
        tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], per_device_train_batch_size=2, max_grad_norm=0.0
    )
    expected = KeepGradients(["lm_head.weight"]).attach(reference)
    reference.train()
    torch.testing.assert_close(kept.steps, expected.steps, rtol=1e-4, atol=1e-7)


def test_the_first_label_of_a_row_is_no_target(tmp_path):
    # labels come unmasked; what is counted is what has a token before it
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD])
    batch = next(iter(trainer.get_train_dataloader()))
    batch["labels"][:, 0] = 10
    assert int(trainer._get_num_items_in_batch([batch, batch], trainer.args.device)) == 4
    assert trainer._get_num_items_in_batch([], trainer.args.device) is None


# ---- steps without a target ----


@layouts
def test_a_micro_step_without_a_target_adds_nothing(tmp_path, collator):
    model = build_bigram()
    trainer = make_trainer(tmp_path, model, [MASKED, [20, 21, 22]], collator=collator, gradient_accumulation_steps=2)
    trainer.train()
    assert losses(trainer) == pytest.approx([0.767273], abs=1e-5)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@layouts
def test_a_step_without_a_target_is_a_loss_of_0_and_warns_once(tmp_path, collator, caplog):
    model = build_bigram()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(tmp_path, model, [MASKED] * 3, collator=collator, optim="sgd", learning_rate=1.0)
    with caplog.at_level(logging.WARNING, logger="tuning"):
        trainer.train()
    assert losses(trainer) == [0.0, 0.0, 0.0]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert caplog.messages == [
        "an optimizer step up to step 1 had no token to train on: every label was -100; its loss counts as 0"
    ]


def test_a_step_without_a_target_is_seen_among_others(tmp_path, caplog):
    rows = [EIGHT_GOOD, MASKED, EIGHT_GOOD]
    trainer = make_trainer(tmp_path, build_bigram(), rows, logging_steps=3, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, logger="tuning"):
        trainer.train()
    assert losses(trainer) == pytest.approx([2 * GOOD / 3], abs=1e-5)
    assert caplog.messages == [
        "an optimizer step up to step 3 had no token to train on: every label was -100; its loss counts as 0"
    ]


def test_no_warning_where_every_step_has_a_target(tmp_path, caplog):
    trainer = make_trainer(tmp_path, build_bigram(), [MASKED, EIGHT_GOOD], gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING, logger="tuning"):
        trainer.train()
    assert caplog.messages == []


# ---- other losses ----


@layouts
@pytest.mark.parametrize("values", [{"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 2}])
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_label_smoothing(tmp_path, collator, values):
    trainer = make_trainer(
        tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], collator=collator, label_smoothing_factor=0.1, **values
    )
    trainer.train()
    assert pytest.approx(1.881023, abs=1e-6) == 0.9 * MEAN + 0.1 * (BAD - 4 / 64)
    assert losses(trainer) == pytest.approx([1.881023], abs=1e-5)


@layouts
def test_dynamic_fine_tuning_weighs_each_token_by_its_probability(tmp_path, collator):
    trainer = make_trainer(
        tmp_path,
        build_bigram(),
        [TWO_BAD, EIGHT_GOOD],
        collator=collator,
        loss_type="dft",
        max_grad_norm=0.0,
        gradient_accumulation_steps=2,
    )
    kept = KeepGradients(["lm_head.weight"]).attach(trainer)
    trainer.train()
    by_hand = (2 * math.exp(-BAD) * BAD + 8 * math.exp(-GOOD) * GOOD) / 10
    assert losses(trainer) == pytest.approx([by_hand], abs=1e-5)
    # the weight is held constant: the gradient at target 21 after 20 is p (p - 1) / 10, not that of p log p
    p = math.exp(-GOOD)
    assert kept.steps[0]["lm_head.weight"][21, 20].item() == pytest.approx(p * (p - 1) / 10, rel=1e-3)


def test_a_loss_in_the_seat_replaces_the_trainers(tmp_path):
    class Constant:
        def __call__(self, model, inputs):
            weight = model.get_input_embeddings().weight
            return LossTerms(nll_sum=weight.sum() * 0 + 21.0, num_tokens=torch.tensor(8))

    trainer = make_trainer(tmp_path, build_bigram(), [EIGHT_GOOD], seats={"loss": Constant()})
    trainer.train()
    assert losses(trainer) == pytest.approx([21.0 / 8])


def test_neftune_adds_noise_while_training_and_is_undone(tmp_path):
    model = build_model()
    plain = make_trainer(tmp_path, build_model(), [TWO_BAD], learning_rate=0.0)
    plain.train()
    trainer = make_trainer(tmp_path, model, [TWO_BAD], learning_rate=0.0, neftune_noise_alpha=5.0)
    trainer.train()
    assert abs(losses(trainer)[0] - losses(plain)[0]) > 1e-3
    embedding = model.get_input_embeddings()
    assert not embedding._forward_hooks
    assert not hasattr(embedding, "neftune_noise_alpha")


EXPERTS = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "attn_implementation": "eager", "max_position_embeddings": 64,
}  # fmt: skip


@layouts
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (MixtralForCausalLM, MixtralConfig(**EXPERTS)),
        # has logits of its own scale, and no num_experts
        (GraniteMoeForCausalLM, GraniteMoeConfig(**EXPERTS, logits_scaling=4.0)),
    ],
    ids=["mixtral", "granite"],
)
def test_a_mixture_of_experts_adds_its_auxiliary_loss(tmp_path, collator, model_class, config):
    torch.manual_seed(0)
    model = model_class(config)
    ids = torch.tensor([EIGHT_GOOD])
    expected = model.eval()(input_ids=ids, labels=ids, output_router_logits=True)
    assert expected.aux_loss > 0.1
    trainer = make_trainer(
        tmp_path, model, [EIGHT_GOOD] * 2, collator=collator, eval_rows=[EIGHT_GOOD], learning_rate=0.0,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(expected.loss.item(), abs=1e-5)
    assert line["aux_loss"] == pytest.approx(expected.aux_loss.item(), abs=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), abs=1e-5)


def test_workers_read_the_same_batches(tmp_path):
    results = []
    for workers in (0, 1):
        trainer = make_trainer(
            tmp_path,
            build_bigram(),
            RAGGED,
            eval_rows=RAGGED,
            seats={"batch_sampler": [[0, 1], [2, 3], [], [4, 5, 6]]},
            dataloader_num_workers=workers,
            learning_rate=0.0,
        )
        trainer.train()
        results.append((losses(trainer), trainer.totals.real, trainer.evaluate()["eval_loss"]))
    assert results[0] == results[1]
    assert results[0][1] == sum(map(len, RAGGED))


# ---- evaluation ----


def exact_loss(rows) -> float:
    costs = [GOOD if after == before + 1 else BAD for row in rows for before, after in itertools.pairwise(row)]
    return sum(costs) / len(costs)


@layouts
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path, collator, size):
    trainer = make_trainer(
        tmp_path, build_bigram(), [TWO_BAD], collator=collator, eval_rows=RAGGED, per_device_eval_batch_size=size
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(exact_loss(RAGGED), abs=1e-5)
    assert metrics["eval_num_tokens"] == sum(map(len, RAGGED))
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(14 / 18)


def test_each_of_several_data_sets_has_its_own_loss(tmp_path):
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD], eval_rows=RAGGED)
    only = trainer.eval_dataset
    trainer.eval_dataset = {"all": only, "bad": only.select([2])}
    metrics = trainer.evaluate()
    assert metrics["eval_all_loss"] == pytest.approx(exact_loss(RAGGED), abs=1e-5)
    assert metrics["eval_bad_loss"] == pytest.approx(BAD, abs=1e-5)


def test_evaluation_leaves_no_mark_in_the_training_meters(tmp_path):
    trainer = make_trainer(
        tmp_path, build_bigram(), [EIGHT_GOOD] * 2, eval_rows=RAGGED, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["num_tokens"] for line in lines] == [9, 18]
    assert [line["supervised_tokens"] for line in lines] == [8, 16]


class Collected:
    """A ``compute_metrics`` that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, prediction, compute_result=True):
        self.calls.append(prediction)
        return {"rows": float(len(prediction.predictions))}


@layouts
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_metrics_get_one_row_a_sample(tmp_path, collator, size):
    rows = [[20, 21], [30, 31, 32, 40], TWO_BAD, [5, 6], EIGHT_GOOD]
    collected = Collected()
    trainer = make_trainer(
        tmp_path,
        build_bigram(),
        # 3 rows in batches of 2: when evaluation starts, the training loader is at its end, with 1 row left over
        rows[:3],
        collator=collator,
        eval_rows=rows,
        hooks={"compute_metrics": collected},
        per_device_train_batch_size=2,
        per_device_eval_batch_size=size,
        eval_strategy="epoch",
    )
    trainer.train()
    (prediction,) = collected.calls
    assert prediction.predictions.shape == (5, 9, 64)
    assert prediction.label_ids.shape == (5, 9)
    for row, ids in enumerate(rows):
        assert prediction.label_ids[row, 1 : len(ids)].tolist() == ids[1:]
        assert (prediction.label_ids[row, len(ids) :] == -100).all()
        guesses = prediction.predictions[row, : len(ids)].argmax(-1)
        assert guesses[0] == ids[0] + 1
    assert trainer.state.log_history[-2]["eval_rows"] == 5.0


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_logits_may_be_reduced_before_they_are_kept(tmp_path):
    collected = Collected()
    trainer = make_trainer(
        tmp_path,
        build_bigram(),
        [TWO_BAD],
        collator="flattened",
        eval_rows=[[20, 21], [30, 31, 32]],
        hooks={"compute_metrics": collected, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        include_for_metrics=["inputs"],
        per_device_eval_batch_size=4,
    )
    trainer.evaluate()
    (prediction,) = collected.calls
    assert prediction.predictions[:, 0].tolist() == [21, 31]
    assert prediction.predictions.shape == (2, 3)
    np.testing.assert_array_equal(prediction.inputs, [[20, 21, -100], [30, 31, 32]])


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_metrics_by_batch_are_told_which_is_the_last(tmp_path):
    seen = []

    def compute(prediction, compute_result):
        seen.append((len(prediction.predictions), compute_result))
        return {"done": 1.0} if compute_result else {}

    trainer = make_trainer(
        tmp_path,
        build_bigram(),
        [TWO_BAD],
        eval_rows=[[20, 21], [30, 31], [40, 41]],
        hooks={"compute_metrics": compute},
        batch_eval_metrics=True,
        per_device_eval_batch_size=2,
    )
    assert trainer.evaluate()["eval_done"] == 1.0
    assert seen == [(2, False), (1, True)]


def build_overfitting(folder, **values):
    """Return a trainer whose evaluation loss falls until step 2 and is higher after it."""
    return make_trainer(
        folder,
        build_bigram(),
        [TWO_BAD] * 6,
        eval_rows=[EIGHT_GOOD, [10, 11, 12]],
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=0.3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        **values,
    )


def test_load_best_model_at_end(tmp_path):
    trainer = build_overfitting(tmp_path, load_best_model_at_end=True)
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 6
    assert np.argmin(evaluations) == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    best = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    last = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    weight = trainer.model.lm_head.weight
    assert torch.equal(weight, best.lm_head.weight)
    assert not torch.equal(weight, last.lm_head.weight)


def test_early_stopping_comes_as_a_callback(tmp_path):
    trainer = build_overfitting(
        tmp_path, load_best_model_at_end=True, seats={"callbacks": (EarlyStoppingCallback(early_stopping_patience=2),)}
    )
    trainer.train()
    assert trainer.state.global_step == 4  # the best was step 2


# ---- waiting for the device ----

WAITING = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")
}


class Waits(TorchDispatchMode):
    """Counts operations whose result the host must know, by the function of ours or upstream's that asks."""

    def __init__(self):
        super().__init__()
        self.is_on = False
        self.sites: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        masks = name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if self.is_on and (name in WAITING or masks):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            self.sites[f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].name}"] += 1
        return func(*args, **(kwargs or {}))


class BetweenLogLines(TrainerCallback):
    """Counts from the first step on to the last, but not while a line is logged."""

    def __init__(self, waits):
        self.waits = waits
        self.steps = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.waits.is_on = state.global_step > 0
        self.steps += state.global_step > 0

    def on_step_end(self, args, state, control, **kwargs):
        self.waits.is_on = False


def count_waits(folder, collator, model=None, **values) -> tuple[Counter, int]:
    model = model or build_model(attn_implementation="sdpa")
    trainer = make_trainer(
        folder, model, [TWO_BAD, EIGHT_GOOD] * 8, collator=collator, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, logging_steps=100, **values,
    )  # fmt: skip
    waits = Waits()
    counter = BetweenLogLines(waits)
    trainer.add_callback(counter)
    with switched(model), waits:
        trainer.train()
    return waits.sites, counter.steps


# transformers' sdpa asks whether a padding mask is all ones, to leave it out then
UPSTREAM_WAITS = {"padded": {"masking_utils.py:_ignore_causal_mask_sdpa"}, "flattened": set()}


@layouts
def test_no_wait_of_ours_between_log_lines(tmp_path, collator):
    sites, steps = count_waits(tmp_path, collator)
    assert steps == 3
    assert set(sites) <= UPSTREAM_WAITS[collator]


def test_the_counter_of_waits_sees_one(tmp_path):
    class Waiting:
        def __call__(self, model, inputs):
            outputs = model(**inputs, fused_lm_head=True)
            return LossTerms(nll_sum=-outputs.log_probs.sum(), num_tokens=outputs.label_mask.sum().item())

    sites, steps = count_waits(tmp_path, "padded", seats={"loss": Waiting()})
    assert sites["test_sft.py:__call__"] == 2 * steps


def test_the_count_of_targets_is_read_on_the_host_alone(tmp_path):
    # batches of a sampler's loader are on the host, and so is their count
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], seats={"batch_sampler": [[0], [1]]})
    batches = list(trainer.get_train_dataloader())
    count = trainer._get_num_items_in_batch(batches, torch.device("meta"))
    assert (count, type(count)) == (10, int)
    on_device = [{"labels": batch["labels"].to("meta")} for batch in batches]
    assert trainer._get_num_items_in_batch(on_device, torch.device("meta")).device.type == "meta"


def test_batches_are_moved_without_waiting(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD])
    asked = []
    original = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: asked.append(kwargs) or original(self, *args, **kwargs)
    )
    trainer._prepare_inputs({"input_ids": torch.ones(1, 2), "more": [torch.ones(1)], "max_length_q": 2})
    assert asked == [{"non_blocking": True}] * 2


# ---- upstream's own flags ----


class Hub:
    """Stands in for the hub's client."""

    def __init__(self, monkeypatch, *, fails: str = ""):
        self.calls = []
        self.fails = fails
        monkeypatch.setattr(HfApi, "create_repo", lambda api, name, **kwargs: self.call("create", name))
        monkeypatch.setattr(
            HfApi, "upload_folder", lambda api, **kwargs: self.call("upload", kwargs["repo_id"], kwargs["folder_path"])
        )

    def call(self, verb, name, *rest):
        if verb == self.fails:
            raise ConnectionError("no way to the hub\nmore lines")
        self.calls.append((verb, name, *rest))
        return SimpleNamespace(repo_id=name)


PUSH = {"push_to_hub": True, "hub_model_id": "someone/tuned", "hub_token": "none"}


def test_push_to_hub_reaches_hugging_face(tmp_path, monkeypatch):
    hub = Hub(monkeypatch)
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD], **PUSH)
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert hub.calls == [("create", "someone/tuned"), ("upload", "someone/tuned", str(tmp_path))]


def test_a_hub_that_refuses_the_repository(tmp_path, monkeypatch):
    Hub(monkeypatch, fails="create")
    with pytest.raises(ConfigError) as caught:
        make_trainer(tmp_path, build_bigram(), [TWO_BAD], **PUSH)
    assert str(caught.value) == (
        "--push_to_hub was asked for, but the repository someone/tuned cannot be made on the hub (no way to the hub); "
        "log in with hf auth login, correct --hub_model_id, or drop --push_to_hub"
    )


def test_a_hub_that_is_gone_when_training_ends(tmp_path, monkeypatch):
    Hub(monkeypatch, fails="upload")
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD], **PUSH)
    trainer.train()
    with pytest.raises(CheckpointError) as caught:
        trainer.save_model(str(tmp_path))
    assert str(caught.value) == (
        f"The model is in {tmp_path}, but it could not be pushed to someone/tuned (no way to the hub); push it with "
        f"hf upload someone/tuned {tmp_path}"
    )
    assert (tmp_path / "model.safetensors").is_file()


def test_an_end_token_of_the_users_is_kept(tmp_path):
    tokenizer = build_tokenizer()
    assert tokenizer.eos_token == "</s>"
    model = build_model()
    trainer = make_trainer(tmp_path, model, [TWO_BAD], eos_token="<|end|>")
    assert trainer.processing_class.eos_token == "<|end|>"
    assert model.config.eos_token_id == trainer.processing_class.eos_token_id
