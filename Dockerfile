# fedfrozen on a CPU, or on a GPU with CUDA. TORCH_INDEX is the package index of the torch that you want (PyTorch's
# own page names one for the CPU alone and one for each CUDA); without it pip takes its usual one:
#   docker build -t fedfrozen --build-arg TORCH_INDEX=INDEX_FOR_CPU .
#   docker build -t fedfrozen-cuda --build-arg TORCH_INDEX=INDEX_FOR_CUDA .
#   docker run --rm -v "$PWD/outputs:/work/outputs" fedfrozen num_rounds=10
#   docker run --rm --gpus all -v "$PWD/outputs:/work/outputs" fedfrozen-cuda
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
RUN pip install . && useradd --create-home fed && mkdir /work && chown fed /work
USER fed
WORKDIR /work
ENTRYPOINT ["fedfrozen"]
