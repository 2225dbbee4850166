# vLLM for GPUs, as its project publishes it, with Mooncake and our plugin.
# NOT BUILT by this project's tests: the base image has 10 GB and no machine of ours reaches its registry.
# Build with `make images ARGS=--all`, or: docker build -f docker/engine-gpu.Dockerfile .

FROM docker.io/library/debian:12.12-slim AS build
# See gateway.Dockerfile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/build.txt /src/requirements/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-deps -r /src/requirements/build.txt
COPY pyproject.toml README.md LICENSE py.typed *.py /src/
COPY engine_plugins /src/engine_plugins
COPY gateway /src/gateway
COPY kvpool /src/kvpool
COPY loadtest /src/loadtest
COPY router /src/router
COPY simulator /src/simulator
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /opt/build/wheels /src

FROM docker.io/vllm/vllm-openai:v0.32.0
# Of the CUDA version that the base has: `mooncake-transfer-engine` for CUDA 12.
ARG MOONCAKE=mooncake-transfer-engine-cuda13==0.3.13.post1
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libcurl4 libibverbs1 libnuma1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home moongate
COPY --from=build /opt/build/wheels /opt/wheels
# Without dependencies: nothing may touch what the base image was tried with.
# hadolint ignore=DL3013
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m pip install --no-cache-dir --no-deps "$MOONCAKE" /opt/wheels/moongate-*.whl \
    && python3 -c "import mooncake.engine, moongate.engine_plugins.vllm_plugin"
COPY --chmod=755 docker/healthcheck.py /usr/local/bin/healthcheck
ENV HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8101
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s \
    CMD ["healthcheck", "http://127.0.0.1:8101/health"]
ENTRYPOINT []
CMD ["moongate", "engine", "serve", "--help"]
