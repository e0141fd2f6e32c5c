# SGLang with kvroute. Build at the root of a clone: docker build -f deploy/sglang.Dockerfile -t kvroute-sglang .
ARG SGLANG=0.5.23
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml LICENSE ./
COPY docs/package.md docs/
COPY examples/paged_engine examples/paged_engine
COPY cache_manager cache_manager
COPY transfer transfer
COPY kvroute kvroute
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmsysorg/sglang:v${SGLANG}
COPY --from=wheel /wheels /wheels
# SGLang finds kvroute's plugin. It does something where --enable-return-routed-experts is given.
RUN pip install --no-cache-dir /wheels/kvroute-*.whl && kvroute doctor --require sglang
