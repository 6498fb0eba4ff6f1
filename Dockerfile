# A volunteer in a container: docker run -v swarmd:/state -p 4117:4117 swarmd up
FROM python:3.11-slim AS build
# One of libp2p's packages (fastecdsa) comes as source for some machines, and is C.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgmp-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/swarmd
COPY constraints.txt pyproject.toml README.md ./
# The CPU build; for CUDA use --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt --index-url $TORCH_INDEX torch==2.13.0
COPY swarmd swarmd
COPY cli cli
COPY systemd systemd
RUN pip install --no-cache-dir -c constraints.txt .

FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgmp10 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
# State in a volume, and nobody's root.
RUN useradd --create-home --uid 10001 swarmd && install -d -o swarmd -g swarmd -m 700 /state
USER 10001
ENV PATH=/opt/venv/bin:$PATH SWARMD_HOME=/state
VOLUME /state
EXPOSE 4117
HEALTHCHECK --interval=60s --timeout=10s --start-period=30s CMD ["/bin/sh", "-c", "swarmd status --json > /dev/null || exit 1"]
ENTRYPOINT ["swarmd"]
CMD ["up"]
