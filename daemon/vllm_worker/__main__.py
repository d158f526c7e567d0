"""A profiling worker around vLLM: ``python daemon/vllm_worker --spec FILE``, in vLLM's own interpreter."""

from __future__ import annotations

import os

from hosted import HostedVllm
from iserve_hosted_http import read_spec, serve


def main() -> None:
    spec, machine, step_timer = read_spec(__doc__)
    os.environ["ISERVE_STEP_TIMER"] = "rpc" if step_timer else "memory"
    import vllm  # noqa: F401  # takes seconds; before the first answer, so that ready means ready

    serve(HostedVllm(spec, step_timer=step_timer), machine)


if __name__ == "__main__":
    main()
