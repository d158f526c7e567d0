"""Options of ``vllm serve`` that a deployment may give with ``--engine-arg``, and those that it may not.

Every option of the releases that iServe knows is in one of two tables. Refused, with the reason, is what takes
memory, sets what was planned or measured, opens the machine, loads code or ends what iServe relies on; taken is
what changes times, answers or logs alone. An option in neither is refused: it may be a new name of one that is
refused, as ``--device-memory-utilization`` was in 0.31, or load code, as ``--model-class-overrides`` since 0.25.
"""

from __future__ import annotations

import json

from daemon.engine_options import EngineOptions, check_options
from fingerprint.errors import ConfigError
from fingerprint.model_use import ModelUse

__all__ = ["OWN_OPTIONS", "TAKEN_OPTIONS", "check_vllm_options", "parser_words", "use_words"]

_ADDRESS = "iServe gives each worker its address; clients reach it through the gateway"
_FOLDER = "a checkpoint is a folder of this machine, and nothing is downloaded"
_KEYS = "the gateway authenticates clients; use `iserve keys` and ISERVE_REQUIRE_KEYS"
_MEMORY = "the memory of a deployment is planned and promised; use --batch, --context or --input-tokens"
_MODEL = "it changes the model that was planned for"

_REFUSED = {
    "use the argument MODEL or `iserve update --model`": "model model-tag",
    "use --engine-arg for each of its options": "config",
    "use --name": "served-model-name",
    "use --context": "max-model-len",
    "use --batch": "max-num-seqs max-num-active-seqs",
    "use --replicas": "data-parallel-size dp",
    "use --tool-call-parser": "enable-auto-tool-choice",
    "use --tool-call-parser of iserve, without --engine-arg": "tool-call-parser",
    "use --reasoning-parser of iserve, without --engine-arg": "reasoning-parser",
    "use --trust-remote-code of iserve, without --engine-arg": "trust-remote-code",
    "one server is watched for each worker; use --replicas": "api-server-count",
    "use a checkpoint that has it": "tokenizer",
    "it prints vLLM's options and ends; run `vllm serve --help` of that environment": "help",
    "what was measured rests on it": """
        block-size compilation-config cudagraph-capture-sizes enable-layerwise-nvtx-tracing enforce-eager
        max-cudagraph-capture-size max-num-batched-tokens max-num-scheduled-tokens model-impl optimization-level
        performance-mode""",
    _MEMORY: """
        aux-output-config cpu-offload-gb cpu-offload-params device-memory-utilization
        disable-hybrid-kv-cache-manager disable-sliding-window enable-cumem-allocator enable-eplb
        enable-nccl-comm-suspend enable-return-routed-experts enable-sleep-mode enable-trace-replay
        engram-config eplb-config gpu-memory-utilization kv-cache-memory-bytes kv-offloading-backend
        kv-offloading-size mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype
        mm-encoder-tp-mode mm-ipc-gpu-memory-gb mm-processor-device num-gpu-blocks-override offload-backend
        offload-group-size
        offload-num-in-group offload-params offload-prefetch-step replayssm-buffer-len return-sampling-mask
        sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names swap-space
        use-replayssm watermark""",
    "use --draft-acceptance for n-gram drafts; a draft model changes the memory that was promised": """
        spec-method spec-model spec-tokens speculative-config""",
    "adapter slots are planned; register adapters with `iserve variant add`": """
        enable-lora max-cpu-loras max-lora-rank max-loras""",
    "a worker loads adapters by request; register them with `iserve variant add`": """
        default-mm-loras lora-modules""",
    "the memory and the times of adapter slots rest on it": """
        enable-mixed-moe-lora-format enable-moe-shared-loras enable-tower-connector-lora fully-sharded-loras
        lora-dtype lora-target-modules max-lora-cls-labels specialize-active-lora""",
    "the plan chooses it; say what is wanted with --intent, --slo or --quality": """
        all2all-backend allow-deprecated-quantization calculate-kv-scales cp-kv-cache-interleave-size
        data-parallel-address data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
        data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port data-parallel-size-local
        data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold
        dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
        decode-context-parallel-size device-ids disable-nccl-for-dp-synchronization distributed-executor-backend
        dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
        dp-sync-interval dtype elastic-ep-max-dp-size enable-dbo enable-elastic-ep enable-ep-weight-filter
        enable-expert-parallel expert-placement-strategy kv-cache-dtype kv-cache-dtype-skip-layers nnodes
        node-rank override-attention-dtype pipeline-parallel-size pp prefill-context-parallel-size quantization
        quantization-config ray-workers-use-nsight tensor-parallel-size tp ubatch-size""",
    "pickled weights are never read, and random ones only for measuring": "load-format pt-load-map-location",
    "a request means the same whatever the checkpoint recommends": "generation-config override-generation-config",
    "a checkpoint without a tokenizer is started so by itself": "skip-tokenizer-init",
    _FOLDER: "code-revision download-dir hf-token ignore-patterns revision tokenizer-revision",
    _MODEL: """
        config-format convert diffusion-config hf-config-path hf-overrides mm-encoder-only pooler-config runner
        weight-transfer-config""",
    _ADDRESS: """
        enable-scale-out grpc grpc-port headless host kv-events-config master-addr master-port port root-path
        tokens-only uds""",
    _KEYS: """
        allow-credentials allowed-headers allowed-methods allowed-origins api-key enable-ssl-refresh
        ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile""",
    "a worker drains for as long as the daemon waits": "shutdown-timeout",
    "the daemon starts a worker again that fails": "enable-fault-tolerance fault-tolerance-config",
    "iServe sets it": "disable-uvicorn-access-log",
    "iServe reads a worker's load from its statistics": "disable-log-stats",
    "iServe reads from the log why a worker failed": "log-level",
    "it loads code that is not the engine's own": """
        additional-config ec-manager-config ec-transfer-config io-processor-plugin kv-transfer-config
        log-config-file logging-config logits-processors middleware model-class-overrides
        reasoning-parser-plugin scheduler-cls structured-outputs-config tool-parser-plugin tool-server
        worker-cls worker-extension-cls""",
    "it writes files where it is given": """
        mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path profiler-config watchdog-config""",
    "it opens this machine's files to clients": "allowed-local-media-path mm-encoder-fp8-scale-path",
    "it may name any file; put the template into the checkpoint as chat_template.jinja": "chat-template",
    "it has the server run or load what clients send": """
        enable-mm-embeds enable-prompt-embeds trust-request-chat-template trust-request-mm-kwargs""",
}
OWN_OPTIONS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}

_TAKEN = """
    aggregate-engine-logging allowed-media-domains anthropic-disabled-thinking-effort async-scheduling
    attention-backend attention-config chat-template-content-format cohere-format
    cohere-is-reasoning-model collect-detailed-traces cpu-distributed-timeout-seconds cudagraph-metrics
    custom-histogram-buckets default-chat-template-kwargs disable-access-log-for-endpoints disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs distributed-timeout-seconds
    enable-batch-sharded-sampling enable-bf16x3-router-gemm enable-chunked-prefill enable-flash-late-interaction
    enable-flashinfer-autotune enable-force-include-usage enable-hc-sp enable-log-deltas enable-log-outputs
    enable-log-requests enable-logging-iteration-details enable-mamba-cache-stochastic-rounding
    enable-mamba-fine-grained-prefix-cache enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
    enable-offline-docs enable-per-request-metrics enable-prefix-caching enable-prompt-tokens-details
    enable-request-id-headers enable-server-load-tracking enable-shm-tensor-arena enable-tokenizer-info-endpoint
    exclude-tools-when-tool-choice-none fail-on-environ-validation fingerprint-mode fingerprint-value
    gdn-prefill-backend h11-max-header-count h11-max-incomplete-event-size interleave-mm-strings ir-op-priority
    jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config kv-cache-metrics
    kv-cache-metrics-sample kv-sharing-fast-prefill language-model-only limit-mm-per-prompt linear-backend
    log-error-stack logprobs-mode long-prefill-token-threshold long-prefill-token-threshold-adaptive mamba-backend
    mamba-cache-philox-rounds mamba-ssu-algorithm max-log-len max-logprobs max-long-partial-prefills
    max-num-partial-prefills max-num-queued-reqs max-num-queued-tokens max-parallel-loading-workers
    media-io-kwargs mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-hasher-algorithm mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model-loader-extra-config moe-backend monokernel numa-bind
    numa-bind-cpus numa-bind-nodes otlp-traces-endpoint per-request-spec-decode-metrics
    prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit
    reasoning-config reasoning-effort-map renderer-num-workers response-role return-tokens-as-token-ids
    safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
    scheduler-reserve-full-isl scheduling-policy seed show-hidden-metrics-for-version skip-mm-profiling
    sparse-indexer-topk-backend sse-keep-alive-interval stream-interval swa-bounded-replay tokenizer-mode
    tool-strict-level use-fp64-gumbel use-tqdm-on-load uvicorn-log-level video-pruning-method video-pruning-rate
    watermark-config"""
TAKEN_OPTIONS = frozenset(_TAKEN.split())


def parser_words(options: EngineOptions) -> tuple[str, ...]:
    """The parsers of ``options`` as words of the command line."""
    words: list[str] = []
    if options.tool_call_parser is not None:
        words += ["--enable-auto-tool-choice", f"--tool-call-parser={options.tool_call_parser}"]
    if options.reasoning_parser is not None:
        words.append(f"--reasoning-parser={options.reasoning_parser}")
    return tuple(words)


_LIMITS = frozenset({"language-model-only", "limit-mm-per-prompt"})  # that --text-only and --images set


def check_vllm_options(options: EngineOptions) -> None:
    """Raise ConfigError for an argument that iServe sets, does not allow or does not know."""
    check_options("vllm", options, OWN_OPTIONS, TAKEN_OPTIONS)
    given = (name for name, _ in options.arguments if name.partition(".")[0].replace("_", "-") in _LIMITS)
    limit = next(given, None)
    if limit is not None and (options.use.text_only or options.use.images):
        asked = "--text-only" if options.use.text_only else "--images"
        raise ConfigError(f"--{limit} of vllm and {asked} set the same limits; leave one of them out")


def use_words(use: ModelUse) -> tuple[str, ...]:
    """Return the words of the command line for how the model is used."""
    words: list[str] = []
    if use.text_only:
        words.append("--language-model-only")
    if use.images:
        words.append(f"--limit-mm-per-prompt={json.dumps({'image': use.images})}")
    if use.trust_remote_code:
        words.append("--trust-remote-code")
    return tuple(words)
