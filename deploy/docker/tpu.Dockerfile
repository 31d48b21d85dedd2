# jaxpd on Cloud TPUs. libtpu comes with JAX's own packages.
#
#     docker build -f deploy/docker/tpu.Dockerfile -t jaxpd-tpu:0.1.0 .        (from the root of the repository)

FROM python:3.13-slim-trixie AS build
WORKDIR /src
RUN python -m venv /opt/jaxpd
COPY . .
RUN /opt/jaxpd/bin/pip install --no-cache-dir '.[structured,tracing,tpu]'

FROM python:3.13-slim-trixie
COPY --from=build /opt/jaxpd /opt/jaxpd
# Built-in models and, without --compile-cache, compiled programs go to /cache/jaxpd: mount a volume there.
RUN install -d -o 10001 -g 10001 /cache
ENV PATH=/opt/jaxpd/bin:$PATH XDG_CACHE_HOME=/cache HOME=/tmp PYTHONUNBUFFERED=1
USER 10001:10001
# A router and a worker are asked in different ways (docs/deploy.md has both commands), and Kubernetes asks itself.
HEALTHCHECK NONE
ENTRYPOINT ["jaxpd"]
CMD ["--help"]
