"""No kernel is compiled anew because a batch has another number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tuning.kernels import rms_norm

EXPECTED = {
    "rms_norm._rms_norm_fwd_kernel": ["num_rows"],
    "rms_norm._rms_norm_bwd_kernel": ["num_rows"],
    "rms_norm._rms_norm_bwd_sum_kernel": ["num_partials"],
    "rope._rope_kernel": ["position_batch_stride", "row_length"],
}
LIST = """
import json, operator
from tuning.kernels import rms_norm, rope
names = {names}
kernels = {{name: operator.attrgetter(name)(type("", (), {{"rms_norm": rms_norm, "rope": rope}})) for name in names}}
print(json.dumps({{name: [p.name for p in kernel.params if p.do_not_specialize] for name, kernel in kernels.items()}}))
"""


def test_counts_of_tokens_are_not_specialised():
    # a process of its own: under the interpreter, which this one may have, kernels have no such list
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", LIST.format(names=list(EXPECTED))],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(run.stdout) == EXPECTED


@pytest.mark.gpu
def test_one_compilation_for_all_numbers_of_rows(device):
    weight = torch.ones(256, device=device, dtype=torch.bfloat16, requires_grad=True)

    def run(rows):
        x = torch.randn(rows, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        rms_norm.rms_norm(x, weight, 1e-6).sum().backward()

    def compiled():
        kernels = (rms_norm._rms_norm_fwd_kernel, rms_norm._rms_norm_bwd_kernel)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    run(17)
    before = compiled()
    for rows in (1, 16, 31, 32, 1024):
        run(rows)
    assert compiled() == before
