"""Help of what a plan, a deployment or a check can be asked for: one text for option and field.

The command line shows a text as an option's help, the REST API as a field's description.
"""

from __future__ import annotations

INTENT = "Goal of the choice."
COST = "Cost model: what a request costs."
PERCENTILE = "Percentage of the requests that must keep each limit of the SLO, when a rate is given."
RATE = (
    "Requests per second to be served; with it, give a batch: else 1 at once is planned for and served. "
    "min-latency and cost-slo rank by the mean request at it, not by a full batch."
)
BURSTINESS = "Coefficient of variation of the gaps between requests; 1: Poisson."
INPUT_CV = "Coefficient of variation of the prompts' lengths."
OUTPUT_CV = "Coefficient of variation of the answers' lengths."
QUALITY = "Change of answers that is allowed: exact (16 bits only), near (int8 and fp8 too), any (everything)."
BUDGET = "Most a request may cost, in the cost's unit."
INPUT_TOKENS = "Prompt length to plan for, in tokens."
OUTPUT_TOKENS = "Answer length to plan for, in tokens."
CONTEXT = (
    "Tokens of the longest request that is taken, prompt and answer together; else the model's most, or what "
    "memory holds."
)
BATCH = (
    "Requests at once, planned for and served at most; else 1 is planned for, and as many are served as memory "
    "holds, up to 256 (with a rate: 1)."
)
EXPECTED_DEPLOYMENTS = (
    "Deployments that the cluster is to hold in all, this one among them; min-latency and cost-slo count what "
    "sharing with them will cost. 0: no more than there are."
)
ENGINE = "Inference engine: torch, vllm, tensorrt-llm or auto."
POLICY = "Placement policy: hybrid, packing, least-loaded or ilp; else that of ISERVE_POLICY."
REPLICAS = "Workers of the configuration, each on devices of its own; the rate is that of all together."
NAME = "Name that clients give as `model`; else the model's own name."
SCALE_TO_ZERO = "Idle seconds after which the workers end; the next request starts them again."
REJECT_LATE = "Answer 503 at once to a request that would miss the SLO, in place of a late answer."
TOOL_CALL_PARSER = "vLLM: format in which the model writes tool calls, such as hermes."
REASONING_PARSER = "vLLM: format in which the model marks its reasoning, such as qwen3."
TEXT_ONLY = "vLLM: leave out a multimodal model's towers for images, video and sound."
IMAGES = "Images in each planned prompt, added to its text."
IMAGE_TOKENS = "Tokens of an image; else as config.json has it."
TRUST_REMOTE_CODE = (
    "vLLM: run Python code of the model's repository (auto_map) as the daemon's user. Read it first."
)
