# vLLM with kvroute. Build at the root of a clone: docker build -f deploy/vllm.Dockerfile -t kvroute-vllm .
ARG VLLM=0.32.0
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml LICENSE ./
COPY docs/package.md docs/
COPY examples/paged_engine examples/paged_engine
COPY cache_manager cache_manager
COPY transfer transfer
COPY kvroute kvroute
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v${VLLM}
COPY --from=wheel /wheels /wheels
# NIXL brings KV from prefill to decode; Mooncake's client is of the same version as its master.
RUN pip install --no-cache-dir /wheels/kvroute-*.whl nixl==1.5.1 mooncake-transfer-engine-cuda13==0.3.13.post1 \
    && kvroute doctor --require vllm
