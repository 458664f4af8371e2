"""The process that runs jobs: a JSON list of them on stdin, a line of JSON per result on stdout.

python -m mlx_paged_attention.kernel_check.worker
"""

import os
import sys

import msgspec

from mlx_paged_attention.kernel_check.check import run
from mlx_paged_attention.kernel_check.jobs import Job


def main() -> None:
    # Results alone go to stdout, whatever compilers and drivers print there.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for job in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Job]):
        results.write(msgspec.json.encode(run(job)) + b"\n")
        results.flush()


if __name__ == "__main__":
    main()
