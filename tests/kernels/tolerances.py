"""The one table of tolerances of the kernel tests: the error that one rounding may leave, by dtype.

An error is the norm of the difference over the norm of the fp64 reference. A result may be off by one unit for each
rounding on its way: 1 where everything is fp32 until the store, 2 where the model's convention rounds in between. The
numbers are bounds, not chosen to pass: rounding bf16 (8 bits) to nearest errs by at most 2**-8, fp16 (11 bits) by
2**-11. Triton's interpreter truncates instead, which errs by twice that. fp32 keeps 24 bits, and a sum of some
thousand terms loses up to 4 of them.
"""

import torch

UNIT = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNIT_INTERPRETED = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def tolerance(dtype: torch.dtype, roundings: int, *, interpreted: bool) -> float:
    return roundings * (UNIT_INTERPRETED if interpreted else UNIT)[dtype]
