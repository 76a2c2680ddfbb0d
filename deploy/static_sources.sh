#!/usr/bin/env bash
# Fetches the source of the two libraries for which Debian and Ubuntu have no archive to link statically, in the
# installed release. The preset wheel compiles them (cmake/static_libraries.cmake).
#
#   deploy/static_sources.sh FOLDER       makes FOLDER/prometheus-cpp and FOLDER/cpp-httplib
#
# apt checks signatures and digests. The system's own list of sources is not changed.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)

fail() {
  echo "static_sources: $*" >&2
  exit 1
}

# The release of the source package that the installed binary package was made from.
version_of() {
  dpkg-query --show --showformat='${source:Version}' "$1" 2>/dev/null ||
    fail "expected the package $1 to be installed; deploy/install_deps.sh wheel installs it"
}
wanted=("prometheus-cpp=$(version_of prometheus-cpp-dev)" "cpp-httplib=$(version_of libcpp-httplib-dev)")
if [[ -f $folder/.fetched && $(<"$folder/.fetched") == "${wanted[*]}" ]]; then
  echo "static_sources: ${wanted[*]} are in $folder"
  exit 0
fi

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt/lists/partial" "$apt/parts"
# apt has two forms of lists. In both, replace the binary packages by the source packages.
for list in /etc/apt/sources.list.d/*.sources; do
  [[ ! -f $list ]] || sed 's/^Types:.*/Types: deb-src/' "$list" >"$apt/parts/${list##*/}"
done
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [[ ! -f $list ]] || sed -n 's/^deb /deb-src /p' "$list" >"$apt/parts/$(basename "$list" .list).list"
done
options=(-q -o "Dir::State::Lists=$apt/lists" -o Dir::Etc::sourcelist=- -o "Dir::Etc::sourceparts=$apt/parts"
  -o APT::Sandbox::User=root)
apt-get "${options[@]}" update >/dev/null || fail "apt-get could not read the lists of sources (its message is above)"

rm -rf "${folder:?}"/{.fetched,prometheus-cpp,cpp-httplib,download}
mkdir -p "$folder/download"
(cd "$folder/download" && apt-get "${options[@]}" source --only-source "${wanted[@]}" >/dev/null) ||
  fail "apt-get could not fetch ${wanted[*]} (its message is above)"
for name in prometheus-cpp cpp-httplib; do
  mv "$folder/download/$name"-*/ "$folder/$name"
done
rm -rf "$folder/download"
echo "${wanted[*]}" >"$folder/.fetched"
echo "static_sources: fetched ${wanted[*]} into $folder"
