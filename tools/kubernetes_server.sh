#!/bin/sh
# Builds Kubernetes' API server from Debian's source package into build/kubernetes/bin, for `make test-kubernetes`.
# Debian 12 has Kubernetes 1.20: it has no Indexed Jobs, so the tests give it the pods of the manifests.
set -eu

FOLDER=$PWD/build/kubernetes
[ -x "$FOLDER/bin/kube-apiserver" ] && exit 0
. /etc/os-release
if [ "${VERSION_CODENAME:-}" != bookworm ] || [ "$(id -u)" != 0 ]; then
    echo "NOTE: kube-apiserver can be built on Debian 12 only, as root; elsewhere set KUBEBUILDER_ASSETS" >&2
    exit 0
fi

echo "building kube-apiserver into build/kubernetes/bin (once; some minutes) ..."
mkdir -p "$FOLDER/lists/partial" "$FOLDER/sources" "$FOLDER/bin"
# The machine's own sources are left as they are.
sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources > "$FOLDER/sources/debian.sources"
sourced() {
    apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$FOLDER/sources" -o "Dir::State::lists=$FOLDER/lists" \
        -o APT::Sandbox::User=root "$@"
}
sourced update
DEBIAN_FRONTEND=noninteractive sourced install -y --no-install-recommends dpkg-dev gcc golang-1.19-go jq make openssl rsync > /dev/null
cd "$FOLDER"
sourced source kubernetes > /dev/null 2>&1
# Its module file is too old for this Go; as part of a GOPATH none is read.
mkdir -p go/src/k8s.io
mv kubernetes-*/ go/src/k8s.io/kubernetes
cd go/src/k8s.io/kubernetes
export PATH="/usr/lib/go-1.19/bin:$PATH" GOCACHE="$FOLDER/cache" GOPATH="$FOLDER/go" GO111MODULE=off
nice -n 10 make gen_openapi > "$FOLDER/build.log" 2>&1 || { tail "$FOLDER/build.log" >&2; exit 1; }
CGO_ENABLED=0 nice -n 10 go build -o "$FOLDER/bin/kube-apiserver" ./cmd/kube-apiserver
cd "$FOLDER"
rm -rf kubernetes_* cache go lists sources
