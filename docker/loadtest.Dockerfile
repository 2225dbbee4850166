# The load generator: `moongate loadtest`, and locust's master and workers.
# Build with `make images`, or: docker build -f docker/loadtest.Dockerfile .

FROM docker.io/library/debian:12.12-slim AS build
# See gateway.Dockerfile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/gateway.txt requirements/loadtest.txt requirements/build.txt /src/requirements/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/moongate \
    && /opt/moongate/bin/pip install --no-cache-dir --no-deps \
        -r /src/requirements/loadtest.txt -r /src/requirements/build.txt
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
    && /opt/moongate/bin/pip uninstall -y hf-xet setuptools pip \
    && ln -s /opt/moongate/lib/python3*/site-packages/moongate/loadtest/locustfile.py /opt/moongate/

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
WORKDIR /home/moongate
EXPOSE 8089
STOPSIGNAL SIGTERM
# A worker's is its connection to the master: docker-compose.yml says so.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["healthcheck", "http://127.0.0.1:8089/"]
CMD ["locust", "-f", "/opt/moongate/locustfile.py"]
