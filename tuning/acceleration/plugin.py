"""The public plugin interface: what a plugin is told (:class:`Facts`) and what it may hand back.

A plugin never reaches into a stage. It returns values, and the framework seats them: a model loader, patches on
modules, a collator around the one before it, a batch sampler, a loss, trainer callbacks. A seat that replaces a part
of the trainer has at most one taker. Third parties register a subclass under the entry-point group
``tuning.plugins``.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from tuning.seats import Collator, Loss, LossTerms

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn
    from torch.utils.data import Sampler
    from transformers import PretrainedConfig, TrainerCallback, TrainingArguments

__all__ = ["AccelerationPlugin", "Collator", "Facts", "Lengths", "Loss", "LossTerms", "Patch"]

C = TypeVar("C")
Lengths: TypeAlias = "Sequence[int] | npt.NDArray[np.int64]"  # tokens a sample, in dataset order


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known before the weights are loaded; read-only.

    Attributes:
        model_config: The checkpoint's ``config.json``.
        model_name_or_path: Where the checkpoint is, as the user gave it.
        model_kwargs: Keyword arguments the ordinary loader would give ``from_pretrained`` (dtype, revision,
            trust_remote_code, gguf_file); a plugin that takes the ``load_model`` seat passes them on.
        train_args: The Hugging Face training arguments, complete.
        peft_config: peft's own config object (``peft.LoraConfig`` ...), or None for full fine-tuning.
        active: Flag names of every plugin of this run.
        world_size: Data-parallel ranks.
        rank: Data-parallel rank of this process, from 0.
        seed: Run seed; for data order ``train_args.data_seed`` wins where it is set.
        device_type: ``"cuda"``, ``"cpu"``, ...
        compute_capability: (major, minor) of the GPU; None without one.
    """

    model_config: PretrainedConfig
    model_name_or_path: str
    model_kwargs: Mapping[str, Any]
    train_args: TrainingArguments
    peft_config: Any | None
    active: frozenset[str]
    world_size: int
    rank: int
    seed: int
    device_type: str
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One reversible change to one module of one model.

    Attributes:
        name: ``"<plugin>.<what>"``, for example ``"fast_kernels.rms_norm"``; patches of one name are one table row.
        target: Qualified name of the module in the model, ``""`` for the model itself.
        apply: Called with that module; a context manager whose exit undoes the change bit for bit.
    """

    name: str
    target: str
    apply: Callable[[nn.Module], AbstractContextManager[None]]


class AccelerationPlugin(ABC, Generic[C]):
    """Base class of all plugins. Override only the seats you take; every default takes none.

    Class attributes:
        name: The command-line flag without dashes.
        config_type: Dataclass that the flag is parsed into.
        requires: Flag names that must be on as well.
        conflicts: Flag names that must be off.
        packages: Python distributions that must be installed.
        stable: False prints one line that says so.
    """

    name: ClassVar[str]
    config_type: ClassVar[type]
    requires: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    packages: ClassVar[tuple[str, ...]] = ()
    stable: ClassVar[bool] = True

    def __init__(self, config: C) -> None:
        self.config = config

    def may_do_nothing(self) -> bool:
        """Say whether patching nothing is a fine outcome (``auto``); otherwise the framework raises."""
        return False

    def check(self, facts: Facts) -> None:
        """Refuse what cannot work, before the weights are loaded; read only.

        Raises:
            UserError: With what was asked, why not, and what to do.
        """

    def load_model(self, facts: Facts) -> nn.Module | None:
        """Load the model in place of the ordinary loader; None leaves it to that. One taker."""
        return None

    def check_model(self, model: nn.Module, facts: Facts) -> None:
        """Refuse the very model that was loaded (and wrapped by peft); called once, before any patch.

        Raises:
            UserError: As :meth:`check`.
        """

    def patches(self, model: nn.Module, facts: Facts) -> Sequence[Patch]:
        """List the changes to make on ``model``; the framework applies, counts, verifies and undoes them."""
        return ()

    def self_test(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Prove on the patched model and the first real batch that the plugin's promise holds; leave no trace.

        Raises:
            UserError: If it does not.
        """

    def collator(self, inner: Collator, facts: Facts) -> Collator | None:
        """Return a collator to use instead of ``inner`` (may call it); None keeps ``inner``. Tuple order."""
        return None

    def batch_sampler(self, lengths: Lengths, facts: Facts) -> Sampler[list[int]] | None:
        """Return this rank's own batch sampler for training; ``lengths`` are tokens a sample. One taker.

        An empty list is a seat without a sample: the collator makes a filler of it that adds 0 to loss and gradient.
        """
        return None

    def loss(self, facts: Facts) -> Loss | None:
        """Return the loss to use instead of the trainer's own. One taker."""
        return None

    def callbacks(self) -> Sequence[TrainerCallback]:
        """Return callbacks for the trainer."""
        return ()
