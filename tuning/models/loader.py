"""Name or path to model and tokenizer.

A checkpoint is a folder, a hub name, a folder with a ``.gguf`` file in it (``--gguf_file``) or that file itself.
GGUF weights are dequantised at load, so that what is saved is an ordinary safetensors checkpoint.

Config and tokenizer come first and cost little; the weights come last, when everything that can be refused has been.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tuning.config.configs import ModelArguments
from tuning.environment import installed_version
from tuning.errors import ModelError
from tuning.logs import logger
from tuning.models.generation import mend_generation_config_
from tuning.models.load_errors import LOAD_ERRORS, describe
from tuning.models.weights import find_weights_fault

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Checkpoint",
    "LoadedTokenizer",
    "attention_name",
    "find_checkpoint",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resize_embeddings_",
    "weights_dtype",
]

_log = logger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Where a model is.

    Attributes:
        name: Folder or hub name for ``from_pretrained``.
        kwargs: ``gguf_file``, ``revision``, ``trust_remote_code`` as ``from_pretrained`` takes them.
    """

    name: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """A tokenizer ready for training.

    Attributes:
        tokenizer: With a pad token and, where one was given, the user's chat template.
        added: Tokens that were added to its vocabulary, in order.
    """

    tokenizer: PreTrainedTokenizerBase
    added: tuple[str, ...]


def find_checkpoint(model: ModelArguments, *, trust_remote_code: bool = False) -> Checkpoint:
    """Say where the checkpoint of ``model`` is, reading no weights.

    Raises:
        ModelError: If a local folder holds no config or no weights, or a file is no ``.gguf`` file.
    """
    name = str(model.model_name_or_path)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    gguf_file = model.gguf_file
    path = Path(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"--model_name_or_path {name} is a file but no .gguf file; give the folder it is in, or a .gguf file"
            )
        name, gguf_file = str(path.parent), path.name
        path = path.parent
    if path.is_dir():
        _check_folder(path, gguf_file)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"--model_name_or_path {name} does not exist; give a folder, a .gguf file or a hub name")
    if gguf_file is not None and installed_version("gguf") is None:
        raise ModelError(
            f"--model_name_or_path names the GGUF file {gguf_file}, but the package gguf that reads it is not "
            "installed; pip install gguf"
        )
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        kwargs["gguf_file"] = gguf_file
    if model.model_revision is not None:
        kwargs["revision"] = model.model_revision
    return Checkpoint(name=name, kwargs=kwargs)


def _check_folder(path: Path, gguf_file: str | None) -> None:
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise ModelError(f"--gguf_file {gguf_file} is not in {path}; give the name of a file in that folder")
        return
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        advice = f"; add --gguf_file {found[0].name}" if found else "; give the folder of a saved model"
        if (path / "adapter_config.json").is_file():
            advice = " but an adapter; give the model that it was trained on, or merge the two first"
        raise ModelError(f"--model_name_or_path {path} has no config.json, so it holds no checkpoint{advice}")
    _check_config_file(path / "config.json")
    fault = find_weights_fault(path)
    if fault is not None:
        raise ModelError(
            f"--model_name_or_path {path} holds no complete checkpoint: {fault}; give a folder with config.json and "
            "model.safetensors or pytorch_model.bin, whole or in shards"
        )


def _check_config_file(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); give the folder of a saved model") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no JSON object; give the folder of a saved model")


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Read the model's ``config.json`` (or the header of its GGUF file).

    Raises:
        ModelError: If there is none, it cannot be read, or it is that of no causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint.name, **checkpoint.kwargs)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"The config of --model_name_or_path {_full_name(checkpoint)} cannot be read: {describe(error)}; give the "
            "folder of a saved model, or a hub name that can be reached"
        ) from error
    own_code = getattr(config, "auto_map", None) or {}
    known = any(type(each) in MODEL_FOR_CAUSAL_LM_MAPPING for each in (config, config.get_text_config()))
    if not known and AutoModelForCausalLM.__name__ not in own_code:
        raise ModelError(
            f"--model_name_or_path {checkpoint.name} is a {config.model_type} model, which transformers has no causal "
            "language model for; give a model that generates text token by token"
        )
    return config


def load_tokenizer(
    model: ModelArguments,
    checkpoint: Checkpoint,
    *,
    chat_template: str | None = None,
    add_special_tokens: list[str] | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
) -> LoadedTokenizer:
    """Load the tokenizer and give it what training needs.

    Args:
        model: Names the tokenizer; by default that of the model.
        checkpoint: Of the model.
        chat_template: Jinja text or a file with it, in place of the tokenizer's own.
        add_special_tokens: Tokens to add.
        eos_token: Replaces the end-of-sequence token; must be in the vocabulary.
        pad_token: Replaces the padding token; must be in the vocabulary.

    Returns:
        The tokenizer. Without a pad token of its own it pads with the end token: masks tell them apart, ids do not.

    Raises:
        ModelError: If it cannot be loaded, or a token is not in its vocabulary.
    """
    name = model.tokenizer_name_or_path or checkpoint.name
    kwargs = (
        dict(checkpoint.kwargs)
        if name == checkpoint.name
        else {"trust_remote_code": checkpoint.kwargs["trust_remote_code"]}
    )
    folder = Path(name)
    has_files = "gguf_file" in kwargs or any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
    if folder.is_dir() and not has_files:
        raise ModelError(f"{name} has no tokenizer (tokenizer.json, tokenizer.model); give --tokenizer_name_or_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"No tokenizer can be loaded from {name}: {describe(error)}; give --tokenizer_name_or_path"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    before = set(tokenizer.get_vocab())
    if add_special_tokens:
        tokenizer.add_special_tokens(
            {"extra_special_tokens": list(add_special_tokens)}, replace_extra_special_tokens=False
        )
    for flag, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ModelError(f"--{flag} {token} is not in the vocabulary of {name}; add it with --add_special_tokens")
        setattr(tokenizer, flag, token)
    if tokenizer.eos_token is None:
        raise ModelError(f"The tokenizer of {name} has no end-of-sequence token; give --eos_token")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        _log.info("the tokenizer has no pad token; padding uses %s, told apart by the mask", tokenizer.eos_token)
    added = dict.fromkeys(token for token in (add_special_tokens or []) if token not in before)
    return LoadedTokenizer(tokenizer=tokenizer, added=tuple(added))


def _read_template(template: str) -> str:
    path = Path(template)
    if "{" not in template:
        if not path.is_file():
            raise ModelError(f"--chat_template {template} is neither a Jinja template nor a file; give one of them")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"--chat_template {template} cannot be read as UTF-8 text ({error}); correct it"
            ) from error
    return template


def weights_dtype(torch_dtype: str | None, *, device_type: str) -> torch.dtype | str:
    """Return the dtype of the weights: as asked, else bfloat16 on a GPU and float32 on the CPU.

    Args:
        torch_dtype: ``bfloat16``, ``float16``, ``float32``, ``auto`` or None.
        device_type: Device the run is on.

    Returns:
        A torch dtype, or ``"auto"`` for that of the checkpoint.

    Raises:
        ModelError: If the name is none of them.
    """
    if torch_dtype is None:
        return torch.float32 if device_type == "cpu" else torch.bfloat16
    if torch_dtype == "auto":
        return "auto"
    if torch_dtype not in _DTYPES:
        raise ModelError(f"--torch_dtype {torch_dtype} is not known; use {', '.join(_DTYPES)} or auto")
    return _DTYPES[torch_dtype]


def attention_name(model_config: PretrainedConfig) -> str:
    """Return the attention of a model as loaded; plugins may replace it for the run, by a patch that is undone.

    Args:
        model_config: Of the model; some families, such as state space models, have no sdpa and are refused with it.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"


def load_model(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """Load the weights.

    Args:
        checkpoint: Where they are.
        kwargs: Further keyword arguments of ``from_pretrained``: ``dtype``, ``attn_implementation`` ...

    Raises:
        ModelError: If they cannot be read, or do not fit the config.
    """
    merged = {**checkpoint.kwargs, **kwargs, "ignore_mismatched_sizes": True, "output_loading_info": True}
    if "gguf_file" in merged and hasattr(transformers, "GgufConfig"):
        # newer versions keep the weights packed unless told otherwise, and such a model cannot train
        merged["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(checkpoint.name, **merged)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"The weights of --model_name_or_path {_full_name(checkpoint)} cannot be loaded: {describe(error)}; "
            f"{_advice(checkpoint, kwargs)}"
        ) from error
    _check_weights(checkpoint, type(model).__name__, info)
    mend_generation_config_(model, checkpoint.name)
    if "gguf_file" in merged:
        _make_plain_(model)
    if getattr(model.config, "is_decoder", None) is False:
        # configs of encoders say so, and of some decoders too: only the model itself can tell
        _check_causal(checkpoint, model)
    return model


def _make_plain_(model: PreTrainedModel) -> None:
    """Take from ``model`` what says that it came from a GGUF file, in place: its weights are unpacked.

    Upstream refuses to train or save what it calls quantised, and may have put inference kernels on the layers.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for module in model.modules():
        module.__dict__.pop("forward", None)


def _check_weights(checkpoint: Checkpoint, class_name: str, info: Mapping[str, Any]) -> None:
    """Refuse weights that would start at random, and tell of those that are not used."""
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ModelError(
            f"The checkpoint {checkpoint.name} lacks {len(missing)} weights of {class_name} ({_shorten(missing)}); "
            "they would start at random. Give a complete checkpoint of a causal language model"
        )
    misfits = sorted(f"{name} is {list(there)} and must be {list(here)}" for name, there, here in _mismatches(info))
    if misfits:
        raise ModelError(
            f"The weights of {checkpoint.name} do not have the sizes that its config.json says ({_shorten(misfits)}); "
            "give a folder whose files belong together"
        )
    unused = sorted(info.get("unexpected_keys") or ())
    if unused:
        _log.warning("%s has %d weights that %s does not use: %s", checkpoint.name, len(unused), class_name,
                     _shorten(unused))  # fmt: skip


def _mismatches(info: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(str(item[0]), item[1], item[2]) for item in info.get("mismatched_keys") or ()]


@torch.no_grad()
def _check_causal(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Refuse a model whose prediction for a token changes with the tokens after it."""
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    other = ids.clone()
    other[0, -1] = 0
    before, after = (model(input_ids=each).logits[0, :-1] for each in (ids, other))
    if not torch.equal(before, after):
        raise ModelError(
            f"--model_name_or_path {checkpoint.name} is a {model.config.model_type} model that looks at the tokens "
            "which come after the one it predicts, so it would learn to copy them; give a causal language model"
        )


def _advice(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> str:
    own = set(kwargs) - set(checkpoint.kwargs) - {"dtype", "attn_implementation"}
    if own or kwargs.get("attn_implementation", "sdpa") not in ("sdpa", "eager"):
        return "give a complete checkpoint, or correct --model_init_kwargs if they are the cause"
    return "give a complete checkpoint"


def _full_name(checkpoint: Checkpoint) -> str:
    gguf_file = checkpoint.kwargs.get("gguf_file")
    return checkpoint.name if gguf_file is None else str(Path(checkpoint.name) / gguf_file)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def resize_embeddings_(model: PreTrainedModel, num_tokens: int, *, multiple_of: int = 1) -> int:
    """Grow the embedding of ``model`` in place so that ``num_tokens`` ids fit; it is never made smaller.

    Args:
        model: A causal language model of transformers.
        num_tokens: Length of the tokenizer.
        multiple_of: A grown embedding has a multiple of this many rows.

    Returns:
        Rows that were added; new rows start at the mean of the old ones.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    if num_tokens <= rows:
        return 0
    wanted = -(-num_tokens // multiple_of) * multiple_of
    # upstream draws new rows at random around the mean, after a decomposition of the whole embedding
    model.resize_token_embeddings(wanted, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            if parameter is not None:
                with torch.no_grad():
                    parameter[rows:] = parameter[:rows].float().mean(0).to(parameter.dtype)
    _log.info("embedding grown from %d to %d rows for %d tokens", rows, wanted, num_tokens)
    return wanted - rows
