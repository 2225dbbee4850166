# The gateway, and simulated engines: `moongate serve` and `moongate sim-engine`.
# Build with `make images`, or: docker build -f docker/gateway.Dockerfile .

FROM docker.io/library/debian:12.12-slim AS build
# Debian takes an older version off its mirrors when a fixed one comes, so packages can't be pinned;
# the release is, by the image's tag.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/gateway.txt requirements/build.txt /src/requirements/
# pip's settings, where it needs any, are a secret: they may hold a mirror's password.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/moongate \
    && /opt/moongate/bin/pip install --no-cache-dir --no-deps \
        -r /src/requirements/gateway.txt -r /src/requirements/build.txt
COPY pyproject.toml README.md LICENSE py.typed *.py /src/
COPY engine_plugins /src/engine_plugins
COPY gateway /src/gateway
COPY kvpool /src/kvpool
COPY loadtest /src/loadtest
COPY router /src/router
COPY simulator /src/simulator
# `check`: the lock has all that this Python needs, which is older than the one it was made with. hf-xet
# loads from a model hub (the tokenizers' package asks for it), which nothing here ever does.
RUN /opt/moongate/bin/pip install --no-cache-dir --no-deps --no-build-isolation /src \
    && /opt/moongate/bin/pip check \
    && /opt/moongate/bin/pip uninstall -y hf-xet setuptools pip

FROM docker.io/library/debian:12.12-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 10001 --create-home moongate
COPY --from=build /opt/moongate /opt/moongate
COPY --chmod=755 docker/healthcheck.py /usr/local/bin/healthcheck
ENV PATH=/opt/moongate/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
# It drains: running answers may end within `drain.limit_s`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["healthcheck", "http://127.0.0.1:8000/health"]
CMD ["moongate", "serve", "-c", "/etc/moongate/gateway.yaml"]
