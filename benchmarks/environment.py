"""What timings need of the environment; importing it starts the program again where that is missing.

Only a benchmark is started again, not a test or a notebook that imports one.
What is set already stays as it is: `OMP_WAIT_POLICY=ACTIVE python benchmarks/attacks.py calls`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    # Waiting threads leave the cores to others.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Memory that is given back is zeroed again at the next step, which costs as much as a convolution.
    # This is the largest threshold that glibc takes; both sides run with it.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
is_benchmark = Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent
if is_benchmark and not ENVIRONMENT.keys() <= os.environ.keys():
    os.execve(sys.executable, sys.orig_argv, ENVIRONMENT | os.environ)
