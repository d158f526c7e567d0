#!/bin/sh
# What `make demo` runs: deploy the bundled model by intent, ask its endpoint something, give it two variants that
# know more, an adapter and a full fine-tune kept as a delta, take it all down again.
set -eu
ISERVE_HOME="$(mktemp -d "${TMPDIR:-/tmp}/iserve-demo.XXXXXX")"
export ISERVE_HOME ISERVE_PORT="${ISERVE_PORT:-0}" ISERVE_API_PORT="${ISERVE_API_PORT:-0}"
trap 'iserve down >/dev/null 2>&1 || true; rm -rf "$ISERVE_HOME"' EXIT INT TERM

iserve deploy --intent min-cost --variants 2 --delta-mib 1
for question in '123+456=' 'sort 9 3 44 2' 'What is a fingerprint?'; do
  printf '> %s\n' "$question"
  iserve chat iserve-demo "$question"
done

demo="$(dirname "$0")/../iserve/demo"
iserve variant add capitals --base iserve-demo "$demo/adapters/capitals"
for model in iserve-demo capitals; do
  printf '> %s, what is the capital of Peru?\n' "$model"
  iserve chat "$model" 'what is the capital of Peru?'
done

iserve variant add symbols --base iserve-demo "$demo/deltas/symbols"
printf '> symbols, what is the symbol of silver?\n'
iserve chat symbols 'what is the symbol of silver?'
