"""Flags that say the same thing: one table says which of them is kept."""

from __future__ import annotations

__all__ = ["SYNONYMS", "same_thing"]

# the name that is kept -> the other names of the same thing
SYNONYMS: dict[str, tuple[str, ...]] = {
    "max_seq_length": ("max_length",),
    "fast_kernels": ("use_liger_kernel",),
    "train_on_input": ("completion_only_loss", "assistant_only_loss"),
    "preprocessing_num_workers": ("dataset_num_proc",),
    "chat_template": ("chat_template_path",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "gradient_checkpointing_kwargs": ("activation_checkpointing_kwargs",),
    "report_to": ("trackers",),
}


def same_thing(name: str) -> frozenset[str]:
    """Return ``name`` and every flag that says the same thing."""
    for kept, others in SYNONYMS.items():
        if name == kept or name in others:
            return frozenset((kept, *others))
    return frozenset((name,))
