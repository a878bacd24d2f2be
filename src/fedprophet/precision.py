"""How exactly torch multiplies."""

from contextlib import AbstractContextManager

import torch


def exact_products() -> AbstractContextManager[None]:
    """Let torch's convolutions multiply in float32 where they are asked to, not in TF32, within a `with` block."""
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    return flags
