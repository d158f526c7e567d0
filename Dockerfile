# The embedded engine's workers, for `iserve deploy --engine torch --export compose|k8s`: docker build -t iserve:0.1.0 .
FROM python:3.11-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY fingerprint fingerprint
COPY planner planner
COPY placement placement
COPY daemon daemon
COPY traces traces
COPY iserve iserve
# On GPUs the ordinary build of PyTorch is the right one; for CPU workers alone a CPU build is smaller.
RUN pip install --no-cache-dir .
WORKDIR /
