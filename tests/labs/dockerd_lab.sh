#!/usr/bin/env bash
# A private dockerd (root, no systemd): data, socket and pid file of its own, and namespaces of its own
# for the network and for mounts, so that killing its processes leaves no bridge and no mount behind.
#
#   dockerd_lab.sh install      apt-get install what is missing (root)
#   dockerd_lab.sh missing      print what install would install
#   dockerd_lab.sh start        idempotent: dockerd, and the image hostusr:1
#   dockerd_lab.sh stop|clean   ends it, with its containers; clean removes its files as well
#   eval "$(dockerd_lab.sh env)"   DOCKER_HOST
#
# hostusr:1 has no files of its own, only directories and links: containers mount the host's /usr,
# `docker run -v /usr:/usr:ro hostusr:1 true`. They reach one another, and nothing outside.
# Tried with Debian 12's docker.io 20.10.
set -euo pipefail
LAB=${DOCKERD_LAB_DIR:-/tmp/dockerd-lab}
SOCK=$LAB/docker.sock
GROUP=$(basename "$LAB")  # cgroups of its containers are below this one

say() { printf 'dockerd-lab: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
pid_of() {  # of dockerd, when alive and ours
    local p; p=$(cat "$LAB/docker.pid" 2>/dev/null) && [ -n "$p" ] || return 1
    tr '\0' ' ' < "/proc/$p/cmdline" 2>/dev/null | grep -qF "$LAB/" && echo "$p"
}
gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
answers() { docker -H "unix://$SOCK" version > /dev/null 2>&1; }
need_pkgs() { { command -v dockerd && command -v docker; } > /dev/null || echo docker.io; }

install() {
    local p guard=/usr/sbin/policy-rc.d made=
    p=$(need_pkgs)
    [ -z "$p" ] && { say "packages present"; return; }
    [ "$(id -u)" = 0 ] || die "install needs root: apt-get install $p"
    export DEBIAN_FRONTEND=noninteractive
    # a machine whose packages would start daemons by themselves: forbid it while we install
    if [ ! -e $guard ]; then printf '#!/bin/sh\nexit 101\n' > $guard; chmod 755 $guard; made=1; fi
    apt-get update -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
    apt-get install -y -qq --no-install-recommends "$p"
    [ -z "$made" ] || rm -f $guard
}
image() {
    docker -H "unix://$SOCK" image inspect hostusr:1 > /dev/null 2>&1 && return
    local d l; d=$(mktemp -d "$LAB/img.XXXX")
    mkdir -p "$d"/{dev,proc,sys,tmp,etc,root,run,usr,var/tmp,home}; chmod 1777 "$d/tmp" "$d/var/tmp"
    for l in bin sbin lib lib64 lib32; do [ -L "/$l" ] && ln -s "usr/$l" "$d/$l"; done
    printf 'root:x:0:0:root:/root:/bin/bash\n' > "$d/etc/passwd"; printf 'root:x:0:\n' > "$d/etc/group"
    printf 'hosts: files dns\n' > "$d/etc/nsswitch.conf"; cp /etc/ld.so.cache "$d/etc/" 2>/dev/null || true
    [ ! -d /etc/alternatives ] || cp -a /etc/alternatives "$d/etc/"
    tar -C "$d" -c . | docker -H "unix://$SOCK" import - hostusr:1 > /dev/null; rm -rf -- "$d"
}
start() {
    [ "$(id -u)" = 0 ] || die "dockerd needs root"
    mkdir -p "$LAB"
    if ! pid_of > /dev/null; then
        # mounts that the host makes later are seen, its own stay here; containers "on the host's network" are on this one
        # shellcheck disable=SC2016
        setsid unshare --net --mount --propagation slave bash -c 'ip link set lo up 2> /dev/null || true; exec "$@"' - \
            dockerd --data-root "$LAB/data" --exec-root "$LAB/exec" --pidfile "$LAB/docker.pid" -H "unix://$SOCK" \
            --iptables=false --ip-masq=false --cgroup-parent="/$GROUP" > "$LAB/dockerd.log" 2>&1 < /dev/null &
        for _ in $(seq 300); do answers && break; kill -0 $! 2> /dev/null || break; sleep 0.1; done
        answers || die "dockerd did not come up: $(tail -n 1 "$LAB/dockerd.log")"
    fi
    image
    say "up: DOCKER_HOST=unix://$SOCK"
}
stop() {
    local p all
    p=$(pid_of) || return 0
    all=$(docker -H "unix://$SOCK" ps -aq)
    # shellcheck disable=SC2086
    [ -z "$all" ] || docker -H "unix://$SOCK" rm -f $all > /dev/null
    kill "$p"
    for _ in $(seq 100); do gone "$p" && return; sleep 0.1; done
    kill -KILL "$p"
}
clean() {
    stop
    { find /sys/fs/cgroup -depth -type d \( -path "*/$GROUP" -o -path "*/$GROUP/*" \) -exec rmdir {} + || true; } 2> /dev/null
    rm -rf -- "$LAB"
}
case "${1:-}" in
    install) install ;;
    missing) need_pkgs ;;
    start) start ;;
    stop) stop ;;
    clean) clean ;;
    env) printf 'export DOCKER_HOST=%q\n' "unix://$SOCK" ;;
    *) sed -n '2,13p' "$0"; exit 2 ;;
esac
