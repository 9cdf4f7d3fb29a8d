"""Attention inside the samples of a flattened batch: the bare kernels of torch and others, and our function over them.

A bare kernel is called as its package says, on tensors in the layout it likes best. Ours is called as a model does it:
by its name in transformers' table, with the keyword arguments of a layer. ``over_best`` is our time over that of the
fastest bare kernel. In the end models of two layers run forward and backward under the profiler, which counts how often
the host waited for a value from the device after the first batch: never, or the bench fails.

    python scripts/bench/attention.py --lengths LENGTHS.json
    python scripts/bench/attention.py --tiny
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bench import Recorder, argument_parser, compare, measure
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tuning.attention.flex import list_blocks
from tuning.attention.segments import attend_segments
from tuning.attention.switch import switched
from tuning.attention.variant import Variant
from tuning.attention.varlen import VarlenAttention, registered
from tuning.data.collators import FlattenedCollator
from tuning.environment import installed_version

# FLAN-like tokens a sample: log-normal with a median of 175 and a mean near 276
_MEDIAN, _SIGMA, _SHORTEST, _LONGEST = 175, 0.95, 8, 2048
# four roundings of bf16: probabilities, their gradient, the sum and the result
_ALLOWED = 4 * 2.0**-8
# multiplications of a causal forward and backward: two and five products, of which half is seen
_PRODUCTS = 7
_WAITS = ("aten::item", "aten::_local_scalar_dense", "cudaStreamSynchronize")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A flattened batch.

    Attributes:
        lengths: Tokens of each sample.
        cu_seqlens: Where samples start, and the end.
        longest: Tokens of the longest.
    """

    lengths: list[int]
    cu_seqlens: torch.Tensor
    longest: int


def draw_lengths(path: str | None, tokens: int) -> list[int]:
    """Return lengths that sum to ``tokens``: those of a JSON file (``{"lengths": [...]}``), or log-normal."""
    draw = random.Random(0)
    given = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))["lengths"]
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = draw.choice(given) if given else round(_MEDIAN * 2.718281828 ** draw.gauss(0, _SIGMA))
        if _SHORTEST <= length <= min(_LONGEST, tokens):
            lengths.append(length)
    lengths[-1] -= sum(lengths) - tokens
    return lengths


def bare_varlen(batch: Batch, variant: Variant) -> Attend:
    """Return torch's own variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    groups = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    window = (-1 if variant.window is None else variant.window - 1, 0)
    cu, longest = batch.cu_seqlens, batch.longest
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window, **groups)


def bare_flash_4(batch: Batch, variant: Variant) -> Attend:
    """Return flash-attn-4."""
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    window = (None, None) if variant.window is None else (variant.window - 1, 0)
    options: dict[str, Any] = {
        "cu_seqlens_q": batch.cu_seqlens, "cu_seqlens_k": batch.cu_seqlens, "max_seqlen_q": batch.longest,
        "max_seqlen_k": batch.longest, "causal": True, "window_size": window,
    }  # fmt: skip

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return attend


def bare_flex(batch: Batch, variant: Variant) -> Attend:
    """Return flex_attention, compiled for exactly this batch, its mask made beforehand."""
    device, tokens = batch.cu_seqlens.device, sum(batch.lengths)
    sample = torch.repeat_interleave(
        torch.arange(len(batch.lengths), device=device), torch.tensor(batch.lengths, device=device)
    )
    window, cap = variant.window, variant.softcap

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        inside = (i >= j) & (sample[i] == sample[j])
        return inside if window is None else inside & (i - j < window)

    def capped(score: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(allowed, None, None, tokens, tokens, device=str(device))
    torch._dynamo.reset()  # lengths of an earlier case would make these dynamic
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    score_mod = None if cap is None else capped

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def bare_samples(batch: Batch, variant: Variant) -> Attend:
    """Return torch's scaled_dot_product_attention, sample by sample: for the CPU."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.transpose(0, 1).split(batch.lengths, 1) for x in (q, k, v)), strict=True)
        outs = [functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    return attend


def bare_kernels(batch: Batch, variant: Variant) -> dict[str, Attend]:
    """Return name to bare kernel of each that is here and can do ``variant``."""
    if batch.cu_seqlens.device.type != "cuda":
        return {"samples": bare_samples(batch, variant)} if variant == Variant() else {}
    found = {"flex": bare_flex(batch, variant)}
    if variant.softcap is None:
        found["torch varlen"] = bare_varlen(batch, variant)
        if installed_version("flash-attn-4") is not None:
            found["flash-attn-4"] = bare_flash_4(batch, variant)
    return found


def our_attention(batch: Batch, variant: Variant, name: str) -> Attend:
    """Return our function as a layer of a model calls it."""
    module = nn.Module()
    function = ALL_ATTENTION_FUNCTIONS[name]
    kwargs: dict[str, Any] = {
        "cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.longest, "sliding_window": variant.window,
        "softcap": variant.softcap,
    }  # fmt: skip

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
        return function(module, *rows, None, scaling=q.shape[-1] ** -0.5, dropout=0.0, **kwargs)[0][0]

    return attend


def bench(recorder: Recorder, case: str, batch: Batch, variant: Variant, *, heads: Sequence[int], tiny: bool) -> None:
    """Check and time one case."""
    device, tokens, (num_heads, kv_heads, width) = batch.cu_seqlens.device, sum(batch.lengths), heads
    torch.manual_seed(0)
    shapes = [(tokens, num, width) for num in (num_heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_() for shape in shapes)
    dout = torch.randn(shapes[0], device=device).to(torch.bfloat16)

    def both(attend: Attend) -> Callable[[], Sequence[torch.Tensor]]:
        def work() -> Sequence[torch.Tensor]:
            out = attend(q, k, v)
            return out, *torch.autograd.grad(out, (q, k, v), dout)

        return work

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attend_segments(*wide, batch.cu_seqlens, batch.longest, variant)
    expected = (out.detach(), *torch.autograd.grad(out, wide, dout.double()))
    del out
    with registered(VarlenAttention("sdpa")) as names:
        works = {"ours": both(our_attention(batch, variant, names.flat))}
        works |= {name: both(attend) for name, attend in bare_kernels(batch, variant).items()}
        times = compare(recorder, case, works, expected, allowed=_ALLOWED, tiny=tiny)
    pairs = sum(
        length**2 - max(0, length - (variant.window or length)) ** 2  # twice what a causal window sees
        for length in batch.lengths
    )
    for name, timing in times.items():
        operations = _PRODUCTS * pairs * num_heads * width
        recorder.add(f"{case} {name}", "throughput", operations / timing.p50 / 1e9, "TFLOP/s")
    bare = [timing.p50 for name, timing in times.items() if name != "ours"]
    if bare and "ours" in times:
        recorder.add(case, "over_best", times["ours"].p50 / min(bare), "x")


def count_waits(model_type: str, batch: Batch, *, width: int) -> int:
    """Return how often a model of two layers waits for the device in a batch after the first, both passes."""
    device = batch.cu_seqlens.device
    config = AutoConfig.for_model(
        model_type, vocab_size=512, hidden_size=4 * width, intermediate_size=4 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width, attention_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    draw = random.Random(1)

    def make_inputs() -> dict[str, Any]:
        rows = [[draw.randrange(1, 512) for _ in range(length)] for length in batch.lengths]
        inputs = FlattenedCollator()([{"input_ids": ids, "labels": ids} for ids in rows])
        del inputs["labels"]
        return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}

    with switched(model):
        first, second = make_inputs(), make_inputs()
        model(**first).logits.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            model(**second).logits.sum().backward()
    return sum(event.count for event in profile.key_averages() if event.key in _WAITS)


def main() -> None:
    """Run all cases."""
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", help="JSON file with {'lengths': [...]}; default: log-normal, FLAN-like")
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("attention", csv_path=options.csv, commit=options.commit)
    heads = (4, 2, 16) if options.tiny else (32, 8, 128)
    lengths = draw_lengths(options.lengths, 512 if options.tiny else options.tokens)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    batch = Batch(lengths=lengths, cu_seqlens=bounds, longest=max(lengths))
    size = f"{sum(lengths)} tokens x {len(lengths)} samples bf16"
    cases = {"": Variant(), " window 256": Variant(window=256), " softcap 50": Variant(softcap=50.0)}
    for name, variant in cases.items():
        bench(recorder, f"{size}{name}", batch, variant, heads=heads, tiny=options.tiny)
    listing = measure(lambda: list_blocks(bounds, sum(lengths), None), tiny=options.tiny)
    recorder.add_timing(f"{size} blocks of flex", listing)
    waits = {kind: count_waits(kind, batch, width=heads[2]) for kind in ("llama", "gemma2")}
    for kind, count in waits.items():
        recorder.add(f"{size} {kind}", "waits", count, "a step")
    if any(waits.values()):
        sys.exit("the host waits for values from the device in attention layers")


if __name__ == "__main__":
    main()
