"""What one rank does with ``--multipack``, through the whole product: every scenario in one process.

Run by :mod:`tests.distributed.test_multipack` as ``python -m tests.distributed.multipack_scenarios FOLDER`` with the
variables of a launcher set; writes ``FOLDER/rank<N>.json``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import tiny
from tests.equivalence.product import Run, run_product, write_rows
from tests.trainers.test_fit import StopAt, same, weights
from tuning.errors import UserError

MODES = ("exact", "budget")
# the cases of public reports: first ids tell the samples apart
TWELVE = [[10 + i, 40] for i in range(12)]
SIXTEEN = [[10 + i, 40] for i in range(16)]
UNEVEN = [[20 + i] * length for i, length in enumerate((3, 9, 2, 7, 5, 2, 8, 4, 6, 2, 9, 3))]
FULL_AND_ONES = [[10 + i] * length for i, length in enumerate((8, 8, 8, 8, 2, 2, 2, 2))]
C19 = [[10, 30], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
RAGGED = [[10 + i] * (2 + 5 * i % 7) for i in range(11)]
SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(function: Callable[..., Any]) -> Callable[..., Any]:
    for mode in MODES:
        SCENARIOS[f"{function.__name__} {mode}"] = functools.partial(function, mode=mode)
    return function


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def run(folder: Path, rows: Any, *, options: dict[str, Any], **values: Any) -> Run:
    """Train the bigram model on ``rows`` with padding-free batches planned by multipack."""
    model, data = Path(os.environ["PACKTUNE_TEST_MODEL"]), folder.with_suffix(".jsonl")
    if rank() == 0:
        write_rows(data, rows)
    wait_for_all()
    flags = {"padding_free": True, "multipack": options, **values.pop("flags", {})}
    return run_product(str(model), str(data), str(folder), flags=flags, **values)


def told(result: Run) -> dict[str, Any]:
    state = result.trainer.state
    return {
        "ids": result.first_ids(),
        "loss": result.logged("loss"),
        "rates": result.logged("learning_rate"),
        "last_rate": result.trainer.lr_scheduler.get_last_lr()[0],
        "steps": [state.global_step, state.max_steps],
        "epoch": state.epoch,
        "planned": len(result.trainer.batch_sampler),
        "tokens": result.metrics["train_real_tokens"],
    }


@scenario
def epochs(folder: Path, *, mode: str) -> Any:
    return told(run(folder, TWELVE, options={"mode": mode}, per_device_train_batch_size=2, num_train_epochs=3))


@scenario
def another_seed(folder: Path, *, mode: str) -> Any:
    values = {"per_device_train_batch_size": 2, "num_train_epochs": 1}
    return told(run(folder, TWELVE, options={"mode": mode}, seed=7, **values))


@scenario
def no_second_sharding(folder: Path, *, mode: str) -> Any:
    return told(run(folder, SIXTEEN, options={"mode": mode}, per_device_train_batch_size=2, num_train_epochs=1))


@scenario
def lengths_and_schedule(folder: Path, *, mode: str) -> Any:
    options = {"mode": mode, "max_tokens": 10} if mode == "budget" else {"mode": mode}
    return told(run(folder, UNEVEN, options=options, num_train_epochs=2, gradient_accumulation_steps=2))


@scenario
def accumulation_beyond_the_epoch(folder: Path, *, mode: str) -> Any:
    return told(run(folder, TWELVE, options={"mode": mode}, num_train_epochs=2, gradient_accumulation_steps=50))


@scenario
def half_an_epoch_more(folder: Path, *, mode: str) -> Any:
    return told(run(folder, SIXTEEN, options={"mode": mode}, num_train_epochs=1.5))


@scenario
def max_steps_inside_the_second_epoch(folder: Path, *, mode: str) -> Any:
    steps = -(-12 // world_size()) + 1
    return told(run(folder, TWELVE, options={"mode": mode}, max_steps=steps))


@scenario
def uneven_packs(folder: Path, *, mode: str) -> Any:
    options = {"mode": mode, "max_tokens": 8} if mode == "budget" else {"mode": mode}
    return told(run(folder, FULL_AND_ONES, options=options, num_train_epochs=1))


@scenario
def one_sample(folder: Path, *, mode: str) -> Any:
    return told(run(folder, [[10, 11, 12]], options={"mode": mode}, num_train_epochs=2))


@scenario
def three_samples(folder: Path, *, mode: str) -> Any:
    rows = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    return told(run(folder, rows, options={"mode": mode}, num_train_epochs=2))


@scenario
def one_huge_sample(folder: Path, *, mode: str) -> Any:
    rows = [[10] * 120, *([20 + i, 40] for i in range(15))]
    return told(run(folder, rows, options={"mode": mode}, per_device_train_batch_size=2, num_train_epochs=1))


def one_step(folder: Path, *, mode: str, kernels: tuple[str, ...] = ()) -> Any:
    # whatever the mode, both samples are in the first step
    sgd = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 1}
    values = {"per_device_train_batch_size": max(1, 2 // world_size()), "gradient_accumulation_steps": 2}
    flags = {"fast_kernels": kernels} if kernels else {}
    result = run(folder, C19, options={"mode": mode}, flags=flags, **sgd, **values)
    weight = result.trainer.model.lm_head.weight
    return {"loss": result.logged("loss"), "weights": [weight[30, 10].item(), weight[21, 20].item()]}


@scenario
def loss_a_token(folder: Path, *, mode: str) -> Any:
    return one_step(folder, mode=mode)


@scenario
def loss_a_token_of_kernels(folder: Path, *, mode: str) -> Any:
    layers = ("rms_norm", "rope", "swiglu")
    return [
        one_step(folder / loss, mode=mode, kernels=(loss, *layers))
        for loss in ("cross_entropy", "linear_cross_entropy")
    ]


@scenario
def evaluation(folder: Path, *, mode: str) -> Any:
    data = folder.parent / "evaluation.jsonl"
    if rank() == 0:
        write_rows(data, RAGGED)
    results = {}
    for size in (1, 3, 8):
        result = run(
            folder, TWELVE, options={"mode": mode}, per_device_train_batch_size=2, num_train_epochs=1,
            eval_strategy="epoch", evaluation=str(data), per_device_eval_batch_size=size, learning_rate=0.0,
        )  # fmt: skip
        evaluated = [values["input_ids"][0, values["cu_seq_lens_q"][:-1].long()] for values in result.record.evaluated]
        ids = sorted(i for batch in evaluated for i in batch.tolist() if i)
        results[size] = {
            "loss": result.logged("eval_loss"), "tokens": result.logged("eval_num_tokens"), "ids": ids,
            "train": told(result),
        }  # fmt: skip
    return results


@scenario
def resumed(folder: Path, *, mode: str) -> Any:
    """Stop in the middle of the second epoch and go on, as an unbroken run would."""
    values: dict[str, Any] = {
        "options": {"mode": mode}, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1,
        "learning_rate": 0.1, "gradient_accumulation_steps": 2, "optim": "adamw_torch",
    }  # fmt: skip
    whole = run(folder / "whole", UNEVEN, **values)
    stop = whole.trainer.state.max_steps // 3 + 1
    run(folder / "broken", UNEVEN, callbacks=[StopAt(stop)], **values)
    wait_for_all()
    rest = run(folder / "broken", UNEVEN, **{**values, "resume_from_checkpoint": "true"})
    return {
        "stop": stop,
        "whole": whole.first_ids(),
        "rest": rest.first_ids(),
        "same": same(weights(whole.trainer.model), weights(rest.trainer.model)),
        "losses": whole.logged("loss") == rest.logged("loss"),
    }


@scenario
def resumed_with_another_seed(folder: Path, *, mode: str) -> Any:
    values: dict[str, Any] = {
        "options": {"mode": mode}, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    run(folder / "broken", TWELVE, callbacks=[StopAt(2)], **values)
    wait_for_all()
    try:
        run(folder / "broken", TWELVE, **{**values, "resume_from_checkpoint": "true", "seed": 5})
    except UserError as error:
        return str(error)
    return "it went on"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if world_size() > 1:
        dist.init_process_group("gloo")
    os.environ["PACKTUNE_TEST_MODEL"] = str(folder / "model")
    if rank() == 0:
        tiny.save(folder / "model", model=tiny.build_bigram(vocab_size=tiny.VOCAB_SIZE))
    wait_for_all()
    results: dict[str, Any] = {"world_size": world_size()}
    for name, play in SCENARIOS.items():
        try:
            results[name] = play(folder / name.replace(" ", "_"))
        except Exception:  # noqa: BLE001 - told by the test of that name
            results[name] = {"error": traceback.format_exc()}
            break  # the other ranks are somewhere else now
        wait_for_all()
    (folder / f"rank{rank()}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
