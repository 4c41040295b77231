"""Which of a job's processes this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Set by torchrun and verl, Slurm, Open MPI and MPICH in each process of a job; the first one counts."""


def rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Give the number of this process in its job; None when it is not one of several.

    ``torch.distributed`` is asked first, where it runs, then variables, ``LOCAL_RANK`` last, since it begins
    anew on each machine.

    Args:
        environ: in place of ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in (*_RANKS, "LOCAL_RANK"):
        text = environ.get(name, "").strip()
        if text.isdecimal():
            return int(text)
    return None
