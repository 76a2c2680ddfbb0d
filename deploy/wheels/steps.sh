#!/usr/bin/env bash
# The steps from a checkout to an installed isobit, shared by `make wheels`, `make check-wheels` and the Dockerfile.
#
#   deploy/wheels/steps.sh build PACKAGE...      builds isobit, isobit-cuda or isobit-torch into dist/ (Debian 12)
#   deploy/wheels/steps.sh system                as root: installs the Debian packages that isobit needs to run
#   deploy/wheels/steps.sh install FOLDER WHAT.. makes a virtual environment and installs WHAT there, as pip names it
#   deploy/wheels/steps.sh link FOLDER           as root: links its commands into /usr/local/bin
#
# build needs the packages of `deploy/install_deps.sh wheel`, and nvcc 13 for isobit-cuda; install needs no compiler.
# The variable PYTHON selects another Python than python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${PYTHON:=python3}"
export PATH=$PATH:/usr/local/cuda/bin  # where the toolkit puts nvcc
unset PYTHONPATH  # pip would take packages on it for installed ones
for_cpus=(isobit-rollout isobit-scorer isobit-comparator isobit-model isobit-bench)
for_gpus=(isobit-rollout isobit-scorer isobit-numerics)
platform=manylinux_2_34_x86_64  # the newest glibc that Debian 12's archives need is 2.34

fail() {
  echo "wheels: $*" >&2
  exit 1
}

# Installs auditwheel and the validator of the SBOM in an environment of their own.
tools() {
  local wanted=$root/deploy/wheels/requirements.txt
  tools=$root/build/wheel-tools
  if [[ ! $tools/.installed -nt $wanted ]]; then
    "$PYTHON" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check -r "$wanted"
    touch "$tools/.installed"
  fi
}

# compile PRESET TARGET...: for programs, it also compiles the archives that Debian does not have.
compile() {
  local preset=$1 options=()
  shift
  [[ $preset == wheel-torch* ]] || "$root/deploy/static_sources.sh" "$root/build/static-sources"
  # The headers of NCCL come from a package of this environment.
  [[ $preset != *cuda ]] || options+=("-DISOBIT_PYTHON=$root/.venv/bin/python")
  (cd "$root" && cmake --preset "$preset" "${options[@]}" >/dev/null &&
    cmake --build --preset "$preset" --target "$@")
}

# pack PACKAGE SOURCE_FOLDER BUILD_FOLDER INTO BINARY... [-- OPTION OF AUDITWHEEL...]
pack() {
  local package=$1 source=$2 build=$3 into=$4 binaries=() version stage
  shift 4
  while (($#)) && [[ $1 != -- ]]; do
    binaries+=("$1")
    shift
  done
  shift $(($# > 0))
  version=$(sed -nE 's/^version = "(.*)"/\1/p' "$source/pyproject.toml")
  stage=$root/build/wheel-files/$package
  rm -rf "$stage"
  mkdir -p "$stage/files/$into" "$stage/wheel" "$root/dist"
  "$PYTHON" "$root/deploy/wheels/bundled.py" "$build" "$stage" --name="$package" --version="$version" "${binaries[@]}"
  local binary
  for binary in "${binaries[@]}"; do
    strip -o "$stage/files/$into/${binary##*/}" "$binary"
  done
  ISOBIT_WHEEL_FILES=$stage "$tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir="$stage/wheel" "$source"
  rm -f "$root/dist/${package//-/_}"-*.whl
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat "$platform" --only-plat "$@" \
    --wheel-dir="$root/dist" "$stage/wheel"/*.whl
  ls -l "$root/dist/${package//-/_}"-*.whl
}

build() {
  tools
  local package
  for package; do
    case $package in
      isobit)
        compile wheel "${for_cpus[@]}"
        pack isobit "$root/python" "$root/build/wheel" bin "${for_cpus[@]/#/$root/build/wheel/bin/}"
        ;;
      isobit-cuda)
        command -v nvcc >/dev/null || fail "isobit-cuda needs nvcc 13; without it, name only isobit and isobit-torch"
        compile wheel-cuda "${for_gpus[@]}"
        # NVIDIA's own wheels have these libraries; the preset sets the run path by which the services find them.
        pack isobit-cuda "$root/python/cuda" "$root/build/wheel-cuda" bin \
          "${for_gpus[@]/#/$root/build/wheel-cuda/bin/}" \
          -- --exclude libnccl.so.2 --exclude libcublas.so.13 --exclude libcublasLt.so.13
        ;;
      isobit-torch)
        compile wheel-torch isobit_torch
        local libraries=("$root/build/wheel-torch/lib/libisobit_torch.so") from=$root/build/wheel-torch
        if command -v nvcc >/dev/null; then
          compile wheel-torch-cuda isobit_torch
          from=$root/build/wheel-torch-cuda
          libraries+=("$from/lib/libisobit_torch_cuda.so")
          cp "$from/lib/libisobit_torch.so" "${libraries[1]}"
        else
          echo "wheels: no nvcc: isobit-torch gets only the operators for CPUs" >&2
        fi
        # A shared library cannot use archives that were compiled for programs. auditwheel bundles the libraries that
        # it needs, and lists them in an SBOM of their own. PyTorch's libraries are in the process that loads it.
        pack isobit-torch "$root/python/operators" "$from" . "${libraries[@]}" -- --exclude 'libtorch*.so' --exclude libc10.so
        ;;
      *) fail "expected isobit, isobit-cuda or isobit-torch, got $package" ;;
    esac
  done
}

system() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  apt-get install -q -y --no-install-recommends ca-certificates curl python3 python3-venv
  rm -rf /var/lib/apt/lists/*
}

install() {
  local folder=$1
  shift
  "$PYTHON" -m venv "$folder"
  "$folder/bin/python" -m pip install --no-cache-dir --quiet --disable-pip-version-check "$@"
}

# If the services for GPUs are installed, they are linked instead of those for CPUs.
link() {
  local binary name
  for binary in "$1"/bin/isobit "$1"/lib/python3*/site-packages/{isobit_cuda,isobit}/bin/*; do
    name=/usr/local/bin/${binary##*/}
    [[ ! -x $binary || -e $name ]] || ln -s "$binary" "$name"
  done
}

case ${1:-} in
  build | system | install | link) "$@" ;;
  *) fail "expected build, system, install or link, got '${1:-}'; this script's first lines explain them" ;;
esac
