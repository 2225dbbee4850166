# vLLM for CPUs, Mooncake (engines, `mooncake_master`, `mooncake_client`) and our plugin.
# Build with `make images`, or: docker build -f docker/engine-cpu.Dockerfile
#   --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> .

FROM docker.io/library/debian:12.12-slim AS build
# Where pip finds a CPU build of torch, unless its settings (the secret) say so already.
ARG PIP_EXTRA_INDEX_URL
# See gateway.Dockerfile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/engine.txt requirements/build.txt /src/requirements/
# The lock is complete, so nothing is resolved; a CUDA build of torch would be 3 GB more, and is refused.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/engine \
    && if [ -z "$PIP_EXTRA_INDEX_URL" ]; then unset PIP_EXTRA_INDEX_URL; fi \
    && /opt/engine/bin/pip install --no-cache-dir --no-deps -r /src/requirements/engine.txt \
    && /opt/engine/bin/python -c "import torch; assert torch.version.cuda is None, torch.__version__"
# In an environment of its own, since the engine's setuptools is older than our build needs.
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
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /opt/build/wheels /src \
    && /opt/engine/bin/pip install --no-cache-dir --no-deps /opt/build/wheels/moongate-*.whl

FROM docker.io/library/debian:12.12-slim
# What Mooncake and vLLM's kernels link, and `lscpu` (util-linux), which vLLM asks for the cores.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates libcurl4 libibverbs1 libnuma1 python3 util-linux \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 10001 --create-home moongate \
    && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/engine /opt/engine
COPY --chmod=755 docker/healthcheck.py /usr/local/bin/healthcheck
# Makes the models of the profile `cpu`.
COPY scripts/make_models.py scripts/engine_cache.py /opt/models/
ENV PATH=/opt/engine/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8101
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s \
    CMD ["healthcheck", "http://127.0.0.1:8101/health"]
CMD ["moongate", "engine", "serve", "--help"]
