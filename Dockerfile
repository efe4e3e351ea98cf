FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/fxserve
WORKDIR /src
# Dependencies by themselves first: a change of the code does not install torch again.
COPY pyproject.toml .
# https://download.pytorch.org/whl/cpu has torch without CUDA, several GB smaller. torchvision must come from there too.
ARG TORCH_INDEX=
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extra = p['optional-dependencies']; print(*p['dependencies'], *extra['openvino'], *extra['otel'], *extra['trained'], sep='\n')" \
      > requirements.txt \
 && grep -E '^torch(vision)?\b' requirements.txt > torch.txt \
 && /opt/fxserve/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt \
 && /opt/fxserve/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY fxcore fxcore
COPY service service
RUN /opt/fxserve/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10001 fxserve \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin fxserve \
 && install -d -o 10001 -g 10001 /cache /cache/torch /cache/compiled /cache/extractors
COPY --from=build /opt/fxserve /opt/fxserve
# Weights are kept in /cache/torch, compiled models in /cache/compiled and what extractors are made of in
# /cache/extractors; nothing else is written but to /tmp, so the root file system can be read-only.
ENV PATH=/opt/fxserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    TORCH_HOME=/cache/torch \
    FXSERVE_CACHE_DIR=/cache/compiled \
    FXSERVE_EXTRACTORS=/cache/extractors \
    FXSERVE_HOST=0.0.0.0 \
    FXSERVE_PORT=8000
VOLUME /cache
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
# Proxies of the environment are for other hosts, not for this one.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['FXSERVE_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["fxserve"]
CMD ["serve"]
