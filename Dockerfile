# Two images: `--target cpu` (also what a plain `docker build .` gives) and `--target cuda`.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/attention/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/attention
COPY pyproject.toml constraints.txt ./
COPY deploy/install_torch.sh deploy/trim.sh deploy/
# Dependencies without the project, so that a change of code does not install them anew.
ARG EXTRAS=server,plot,transformers
RUN python -c 'import os, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = [p["optional-dependencies"][extra] for extra in os.environ["EXTRAS"].split(",")]; \
    print(*p["dependencies"], *sum(extras, []), sep="\n")' > requirements.txt

# The CPU build of torch, or none: with the CUDA packages this image would be some GB larger for nothing. `strip` comes from
# binutils; it makes the packages a fifth smaller.
FROM build AS packages-cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes binutils && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX_URL=
RUN deploy/install_torch.sh /opt/attention/bin/python cpu --no-compile \
    && pip install --no-compile -c constraints.txt -r requirements.txt \
    && deploy/trim.sh /opt/attention

FROM build AS packages-cuda
ARG TORCH_INDEX_URL=
RUN deploy/install_torch.sh /opt/attention/bin/python index --no-compile \
    && pip install --no-compile -c constraints.txt -r requirements.txt \
    && deploy/trim.sh /opt/attention

# The project alone, laid over the packages, as a layer of its own: a change of code moves a megabyte.
FROM build AS project
COPY README.md LICENSE ./
COPY client client
COPY service service
RUN pip install --no-deps --prefix /opt/project .

# Debian and Python as one layer, without what only installs packages, and without manuals and translations.
FROM python:${PYTHON_VERSION}-slim AS base
RUN rm -rf /usr/local/bin/pip* /usr/local/include /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/idlelib \
        /usr/local/lib/python3*/site-packages/* /usr/share/info /usr/share/locale /usr/share/man /var/cache/* \
    && find /usr/share/doc ! -name copyright -type f -delete

FROM scratch AS runtime
# hadolint ignore=DL3067
COPY --from=base / /
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8
RUN groupadd --gid 10001 attention \
    && useradd --uid 10001 --gid attention --no-create-home --home-dir /tmp --shell /usr/sbin/nologin attention \
    && install -d -o attention -g attention /data
# HOME is /tmp: beside /data the only place that is writable when the root file system is not.
ENV PATH=/opt/attention/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ATTENTION_HOST=0.0.0.0 \
    ATTENTION_PORT=8000 \
    ATTENTION_HEALTH_PORT=8001 \
    ATTENTION_MODELS_DIR=/data
USER 10001:10001
VOLUME ["/data"]
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"ATTENTION_HEALTH_PORT\"]}/health/ready', timeout=4)"]
ENTRYPOINT ["attention"]
CMD ["serve"]

FROM runtime AS cuda
# A GPU is asked for by name, so that a missing driver is an error and no silent CPU. The container toolkit reads NVIDIA_*:
# it starts nothing on a driver that is older than the build of torch needs. Segments that grow keep memory in one piece.
ARG NVIDIA_REQUIRE_CUDA=cuda>=13.0
ENV ATTENTION_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=${NVIDIA_REQUIRE_CUDA} \
    PYTORCH_ALLOC_CONF=expandable_segments:True
COPY --from=packages-cuda /opt/attention /opt/attention
COPY --from=project /opt/project /opt/attention

FROM runtime AS cpu
COPY --from=packages-cpu /opt/attention /opt/attention
COPY --from=project /opt/project /opt/attention
