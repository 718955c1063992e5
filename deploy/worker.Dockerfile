# A worker for NVIDIA GPUs. Build from the repository's root:
#   docker build -f deploy/worker.Dockerfile -t precision-worker .
# Without a GPU, for emulated formats: --build-arg BASE=python:3.11-slim --build-arg EXTRA=worker
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}
ARG EXTRA=gpu
WORKDIR /src
COPY pyproject.toml README.md ./
COPY api api
COPY workers workers
COPY optimizer optimizer
COPY migrations migrations
COPY deploy/guide deploy/guide
# The base has torch and transformer-engine, built for each other: pip finds them there.
RUN pip install --no-cache-dir ".[${EXTRA},s3,otel]"
RUN useradd --uid 10001 --create-home precision \
 && install -d -o precision /srv/precision
ENV PYTHONUNBUFFERED=1 PRECISION_DATA_DIR=/srv/precision \
    PRECISION_HEARTBEAT_FILE=/tmp/worker-beats REMAP_SIGTERM=SIGQUIT
USER 10001
# The parent touches the file with every sweep: a probe that asks no broker.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD \
  ["python", "-c", "import os, time; assert time.time() - os.stat('/tmp/worker-beats').st_mtime < 60"]
CMD ["celery", "-A", "workers.app", "worker", "--without-gossip", "--without-mingle"]
