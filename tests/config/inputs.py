"""Valid command lines and launches for the tests of config and command line."""

import json
from pathlib import Path

from tuning.config import validation
from tuning.config.parsing import parse
from tuning.config.run_config import RunConfig
from tuning.environment import Launch
from tuning.errors import ConfigError


def launch(*, rank=0, world_size=1, termination_log=None, config_path=None) -> Launch:
    return Launch(
        rank=rank, local_rank=rank, world_size=world_size, termination_log=termination_log, config_path=config_path
    )


def valid_flags(folder: Path) -> dict[str, str]:
    """Flags that pass every check, over files that are made in ``folder``."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    data = folder / "data.jsonl"
    data.write_text('{"text": "one row"}\n')
    return {"model_name_or_path": str(model), "training_data_path": str(data), "output_dir": str(folder / "out")}


def argv_of(flags: dict[str, str]) -> list[str]:
    return [token for name, value in flags.items() for token in (f"--{name}", value)]


def read(*argv: str, **options) -> RunConfig:
    return parse(list(argv), launch(**options))


def problems_of(*argv: str, **options) -> list[str]:
    """What parsing says is wrong."""
    try:
        read(*argv, **options)
    except ConfigError as error:
        return list(error.problems)
    return []


def broken_rules(folder: Path, *argv: str) -> list[str]:
    """What validation says is wrong with valid flags and ``argv``."""
    config = validation.resolve(read(*argv_of(valid_flags(folder)), *argv), launch())
    try:
        validation.check(config, launch())
    except ConfigError as error:
        return list(error.problems)
    return []


def write_json(path: Path, value) -> str:
    path.write_text(json.dumps(value))
    return str(path)
