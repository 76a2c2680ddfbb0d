#!/usr/bin/env bash
# Installs the Debian packages that a build needs, on Debian 12 or Ubuntu 24.04, as root or with
# sudo. If all of them are installed, it changes nothing and returns at once.
#
#   deploy/install_deps.sh [fuzz|lint|page|wheel]
#
# fuzz: also the packages for the preset fuzz; lint: also clang-tidy; page: also the browser that
# tests the live page (Ubuntu has no package for it); wheel: also the packages for building and
# checking wheels.
set -euo pipefail

packages=(
  # Tools.
  build-essential ccache cmake ninja-build pkgconf python3 python3-venv
  # Libraries of the services.
  libabsl-dev libcpp-httplib-dev libgrpc++-dev libprotobuf-dev libssl-dev nlohmann-json3-dev
  prometheus-cpp-dev protobuf-compiler protobuf-compiler-grpc
  # Tests.
  libgmock-dev libgtest-dev openssl prometheus
)
# libFuzzer comes with clang.
[[ ${1:-} != fuzz ]] || packages+=(clang libclang-rt-dev)
[[ ${1:-} != lint ]] || packages+=(clang-tidy)
# Libraries that libgrpc.a and httplib need; dpkg-source unpacks, debootstrap makes the check's bare root.
[[ ${1:-} != wheel ]] || packages+=(debootstrap dpkg-dev libbrotli-dev libc-ares-dev libre2-dev zlib1g-dev)
[[ ${1:-} != page ]] || packages+=(chromium chromium-driver)

fail() {
  echo "install_deps: $*" >&2
  exit 1
}

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
  fail "this script supports only Debian 12 and Ubuntu 24.04; on other systems, install the contents" \
    "of these packages: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "install_deps: all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null ||
    fail "neither root nor sudo; as root, run: apt-get install ${missing[*]}"
  as_root=(sudo)
fi

# env, because sudo drops the caller's environment.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
echo "install_deps: installing ${missing[*]}"
"${apt[@]}" update -q </dev/null ||
  fail "apt-get could not read the package lists (its message is above)"
"${apt[@]}" install -q -y --no-install-recommends "${missing[@]}" </dev/null ||
  fail "apt-get could not install the packages (its message is above)"
echo "install_deps: done"
