# A volunteer in a container: docker run -v swarmd:/state -p 4117:4117 swarmd up
FROM python:3.11-slim
WORKDIR /opt/swarmd
COPY constraints.txt pyproject.toml README.md ./
COPY swarmd swarmd
COPY cli cli
COPY systemd systemd
# The CPU build; for CUDA use --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt --index-url $TORCH_INDEX torch==2.13.0 \
 && pip install --no-cache-dir -c constraints.txt .
# State in a volume, and nobody's root.
RUN useradd --create-home swarmd && install -d -o swarmd -g swarmd -m 700 /state
USER swarmd
ENV SWARMD_HOME=/state
VOLUME /state
EXPOSE 4117
ENTRYPOINT ["swarmd"]
CMD ["up"]
