# hoconv and its app, for a CPU; for NVIDIA GPUs with
#
#   docker build -t hoconv --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg TORCH=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --gpus all hoconv
ARG BASE=ubuntu:24.04
FROM $BASE
# Kernels are compiled on first use: for a CPU by g++, for GPUs by the nvcc of the base image.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# Before hoconv, which needs the same packages, but whose sources change more often.
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url $TORCH torch torchvision
WORKDIR /hoconv
COPY . .
RUN pip install --no-cache-dir -e '.[app]'
CMD ["hoconv", "doctor"]
