# The API: no torch in it. Build from the repository's root:
#   docker build -f deploy/api.Dockerfile -t precision-api .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md ./
COPY api api
COPY workers workers
COPY optimizer optimizer
COPY migrations migrations
COPY deploy/guide deploy/guide
RUN python -m venv /opt/precision \
 && /opt/precision/bin/pip install --no-cache-dir '.[api,s3,otel]' \
 && ! /opt/precision/bin/python -c 'import torch' 2>/dev/null

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home precision \
 && install -d -o precision /srv/precision
COPY --from=build /opt/precision /opt/precision
# Of glibc's heaps, one for each thread of requests would keep what it once took.
ENV PATH=/opt/precision/bin:$PATH PYTHONUNBUFFERED=1 MALLOC_ARENA_MAX=2 \
    PRECISION_DATA_DIR=/srv/precision
USER 10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s CMD \
  ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
CMD ["python", "-m", "api.server", "--host", "0.0.0.0", "--port", "8080", "--proxied"]
