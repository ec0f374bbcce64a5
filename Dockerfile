# fedfrozen on a CPU, or on a GPU with CUDA. TORCH_INDEX is the package index of the torch that you want (PyTorch's
# own page names one for the CPU alone and one for each CUDA); without it pip takes its usual one:
#   docker build -t fedfrozen --build-arg TORCH_INDEX=INDEX_FOR_CPU .
#   docker build -t fedfrozen-cuda --build-arg TORCH_INDEX=INDEX_FOR_CUDA .
#   mkdir -p outputs    # else Docker makes it, and root owns it
#   docker run --rm --user "$(id -u)" -v "$PWD/outputs:/work/outputs" fedfrozen num_rounds=10
#   docker run --rm --user "$(id -u)" --gpus all -v "$PWD/outputs:/work/outputs" fedfrozen-cuda
# The tests: docker build --target tests -t fedfrozen-tests . && docker run --rm fedfrozen-tests
FROM python:3.11-slim AS base
ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 FLWR_TELEMETRY_ENABLED=0
WORKDIR /src
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11,<2.14"
COPY . .

FROM base AS tests
RUN pip install -e ".[dev]"
CMD ["pytest"]

FROM base AS app
RUN pip install . && mkdir -m 1777 /work
# Whoever it runs as has a home to write to: the results are then theirs, on the host too.
ENV HOME=/work
USER 1000
WORKDIR /work
ENTRYPOINT ["fedfrozen"]
