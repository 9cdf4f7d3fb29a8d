"""What one rank of two does: every scenario in one process, so that the imports are paid for once.

Run by :mod:`tests.distributed.test_two_ranks` as ``python -m tests.distributed.scenarios FOLDER`` with the variables
of a launcher set; writes ``FOLDER/rank<N>.json``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.tiny import build_bigram, build_model
from tests.trainers.harness import EIGHT_GOOD, TWO_BAD, dataset, losses, make_trainer
from tests.trainers.test_fit import ROWS, StopAt, same, weights
from tests.trainers.test_sft import MASKED, RAGGED, Collected
from tuning.trainers.fit import fit

C19 = [[10, 30], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def one_step(folder: Path, collator: str) -> dict[str, Any]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = build_bigram()
    trainer = make_trainer(
        folder, model, C19, collator=collator, per_device_train_batch_size=2 // world_size, max_steps=1, **SGD
    )
    trainer.train()
    weight = model.lm_head.weight
    return {"loss": losses(trainer), "weights": [weight[30, 10].item(), weight[21, 20].item()]}


@scenario
def padded(folder: Path) -> Any:
    return one_step(folder, "padded")


@scenario
def flattened(folder: Path) -> Any:
    return one_step(folder, "flattened")


@scenario
def accumulated(folder: Path) -> Any:
    rows = [TWO_BAD, EIGHT_GOOD, MASKED, [40, 41]]
    trainer = make_trainer(folder, build_bigram(), rows, gradient_accumulation_steps=2)
    trainer.train()
    return losses(trainer)


@scenario
def a_rank_without_target(folder: Path) -> Any:
    model = build_bigram()
    trainer = make_trainer(folder, model, [MASKED, EIGHT_GOOD], **SGD)
    trainer.train()
    return {"loss": losses(trainer), "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters())}


@scenario
def no_rank_has_a_target(folder: Path) -> Any:
    model = build_bigram()
    before = weights(model)
    trainer = make_trainer(folder, model, [MASKED, MASKED], **SGD)
    trainer.train()
    return {"loss": losses(trainer), "still": same(before, weights(model))}


@scenario
def evaluation(folder: Path) -> Any:
    results = {}
    for collator in ("padded", "flattened"):
        for size in (1, 2, 3, 8):
            trainer = make_trainer(
                folder, build_bigram(), C19, collator=collator, eval_rows=RAGGED, per_device_eval_batch_size=size
            )
            metrics = trainer.evaluate()
            results[f"{collator} {size}"] = [metrics["eval_loss"], metrics["eval_num_tokens"]]
    return results


@scenario
def metrics_of_rows(folder: Path) -> Any:
    results = {}
    for collator in ("padded", "flattened"):
        for size in (1, 2, 3, 8):
            collected = Collected()
            trainer = make_trainer(
                folder,
                build_bigram(),
                [*C19, TWO_BAD],
                collator=collator,
                eval_rows=RAGGED,
                hooks={"compute_metrics": collected},
                per_device_eval_batch_size=size,
                eval_strategy="epoch",
            )
            trainer.train()
            (prediction,) = collected.calls
            first = prediction.predictions[:, 0].argmax(-1).tolist()
            lengths = (prediction.label_ids != -100).sum(-1).tolist()
            results[f"{collator} {size}"] = [first, lengths]
    return results


class Collectives(TrainerCallback):
    """Counts the collectives of the interpreter by step; the gradients of DDP go another way."""

    NAMES = (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter", "send", "recv",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.steps: list[dict[str, int]] = []
        self.lines: list[dict[str, int]] = []

    def __enter__(self) -> Collectives:
        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(dist, name, self.wrap(name, original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return counted

    def on_step_end(self, args, state, control, **kwargs):
        # the count of targets of a step comes before its beginning: from one end to the next
        self.steps.append(dict(self.calls))
        self.calls.clear()

    def on_log(self, args, state, control, **kwargs):
        self.lines.append(dict(self.calls))
        self.calls.clear()


@scenario
def collectives(folder: Path) -> Any:
    counter = Collectives()
    trainer = make_trainer(
        folder, build_model(), ROWS * 2, gradient_accumulation_steps=3, logging_steps=4, seats={"callbacks": (counter,)}
    )
    with counter:
        trainer.train()
    return {"steps": counter.steps, "micro_steps": 12, "lines": counter.lines}


@scenario
def meters(folder: Path) -> Any:
    trainer = make_trainer(folder, build_bigram(), ROWS, per_device_train_batch_size=2, logging_steps=2)
    metrics = fit(trainer, None)
    lines = [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    keys = ("train_real_tokens", "train_supervised_tokens", "train_padding_share")
    return {"lines": lines, **{key: metrics[key] for key in keys}}


class RankSampler:
    """A sampler that knows its rank; the last seat of rank 1 is empty."""

    BATCHES = ([[0, 1], [2]], [[3], []])

    def __len__(self) -> int:
        return 2

    def __iter__(self):
        return iter(self.BATCHES[rank()])


@scenario
def empty_seat(folder: Path) -> Any:
    results = {}
    rows = [TWO_BAD, EIGHT_GOOD, [40, 41], [50, 51, 52]]
    for collator in ("padded", "flattened"):
        trainer = make_trainer(
            folder,
            build_bigram(),
            rows,
            collator=collator,
            seats={"batch_sampler": RankSampler()},
            learning_rate=0.0,
        )
        metrics = fit(trainer, None)
        results[collator] = [losses(trainer), metrics["train_real_tokens"]]
    return results


@scenario
def resumed(folder: Path) -> Any:
    values = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random", "num_train_epochs": 2}
    whole, again = build_model(), build_model()
    fit(make_trainer(folder / "whole", whole, ROWS, **values), None)
    fit(make_trainer(folder / "broken", build_model(), ROWS, seats={"callbacks": (StopAt(8),)}, **values), None)
    dist.barrier()
    metrics = fit(make_trainer(folder / "broken", again, ROWS, **values), str(folder / "broken" / "checkpoint-8"))
    return {"same": same(weights(whole), weights(again)), "tokens": metrics["train_real_tokens"]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_trainer(folder / "start", build_bigram(), C19)  # starts the process group
    results: dict[str, Any] = {"world_size": dist.get_world_size() if dist.is_initialized() else 1}
    for name, run in SCENARIOS.items():
        try:
            results[name] = run(folder / name)
        except Exception:  # noqa: BLE001 - told by the test of that name
            results[name] = {"error": traceback.format_exc()}
            break  # the other rank is somewhere else now
    (folder / f"rank{rank()}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    assert dataset([[1]])
    main(Path(sys.argv[1]))
