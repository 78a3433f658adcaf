# An image for controllers, agents and workers. Its command joins a controller:
#   docker build -t elastune --build-arg TORCH_INDEX=INDEX .    CPU: INDEX is that of PyTorch's CPU wheels, see its website
#   docker build -t elastune .                                  CUDA: torch as the package index has it
#   docker run --network host -v /secrets/token:/token:ro elastune --join CONTROLLER:7070 --token-file /token
# A worker needs the core alone; a controller that searches needs --build-arg EXTRAS=[all].
FROM python:3.11-slim
ARG TORCH_INDEX=
ARG EXTRAS=
WORKDIR /build
COPY pyproject.toml constraints.txt README.md ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --no-cache-dir -c constraints.txt ".${EXTRAS}"
# Programs stand in a folder of their own, as in the run's.
WORKDIR /work
RUN useradd --create-home elastune && chown elastune /work
USER elastune
ENTRYPOINT ["elastune", "agent"]
