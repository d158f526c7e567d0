"""A profiling worker around TensorRT-LLM: ``python daemon/tensorrt_llm_worker --spec FILE``, in its Python."""

from __future__ import annotations

import os
import secrets

from iserve_hosted_http import read_spec, serve
from trt_hosted import HostedTensorRtLlm


def main() -> None:
    spec, machine, _ = read_spec(__doc__)
    name = secrets.token_hex(8)
    # Before the import: MPI hands the ranks the environment that it found when it was loaded.
    os.environ["ISERVE_STEP_TIMER"] = f"unix:{name}"
    import tensorrt_llm  # noqa: F401  # takes seconds; before the first answer, so that ready means ready

    serve(HostedTensorRtLlm(spec, name), machine)


if __name__ == "__main__":  # ranks are spawned, and import this file again
    main()
