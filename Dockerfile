FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/fxserve
WORKDIR /src
# Dependencies by themselves first: a change of the code does not install torch again.
COPY pyproject.toml .
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt \
 && /opt/fxserve/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY fxcore fxcore
COPY service service
RUN /opt/fxserve/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10001 fxserve \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin fxserve \
 && install -d -o 10001 -g 10001 /cache /cache/torch
COPY --from=build /opt/fxserve /opt/fxserve
# Weights are kept in /cache/torch; nothing else is written but to /tmp, so the root file system can be read-only.
ENV PATH=/opt/fxserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    TORCH_HOME=/cache/torch \
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
