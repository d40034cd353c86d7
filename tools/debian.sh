#!/bin/sh
# The Debian packages that some tests need. As root they are installed; otherwise they are named, and those tests skip.
set -eu

PACKAGES="btrfs-progs chromium e2fsprogs etcd-client etcd-server fish iproute2 munge nftables openssh-client openssh-server procps prometheus slurm-client slurm-wlm slurmctld slurmd zsh"

missing=""
for package in $PACKAGES; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian packages:$missing"
    # shellcheck disable=SC2086  # one word per package
    if apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; then
        exit 0
    fi
fi
echo "NOTE: not installed:$missing. The tests that need them are skipped." >&2
