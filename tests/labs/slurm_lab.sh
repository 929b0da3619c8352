#!/usr/bin/env bash
# A real Slurm on one machine: one slurmctld, N slurmd (one per pretend node), own munged,
# optionally slurmdbd + a private mariadbd (then sacct works).  No cgroups, no systemd, no docker.
#
#   slurm_lab.sh install           apt-get install what is missing (root)
#   slurm_lab.sh missing           print what install would install
#   slurm_lab.sh start             idempotent: starts what is not running, waits until all nodes are idle
#   slurm_lab.sh stop              ends only the processes it started (pid files, command line checked)
#   slurm_lab.sh restart|status|clean
#   slurm_lab.sh kill-node N       node N dies: SIGKILL its slurmd, its slurmstepds and their tasks
#   slurm_lab.sh start-node N
#   slurm_lab.sh kill-controller   SIGKILL slurmctld; jobs run on
#   slurm_lab.sh start-controller
#   eval "$(slurm_lab.sh env)"     SLURM_CONF for srun/sbatch/..., and (without a database) a small sacct in front of PATH
#
# Every file lives under SLURM_LAB_DIR; /etc/slurm and /etc/munge are neither read nor written.
# The munge key is random, made at first start, mode 0400, and never leaves SLURM_LAB_DIR.
# Tried with Debian 12's Slurm 22.05.
set -euo pipefail
umask 022

LAB=${SLURM_LAB_DIR:-/tmp/slurm-lab}
NODES=${SLURM_LAB_NODES:-4}          # pretend nodes
CPUS=${SLURM_LAB_CPUS:-16}           # pretend CPUs a node (need not exist)
MEM=${SLURM_LAB_MEM:-65536}          # pretend MiB a node
GPUS=${SLURM_LAB_GPUS:-8}            # pretend GPUs a node (0: no gres)
PORT=${SLURM_LAB_PORT:-16817}        # slurmctld; slurmdbd PORT+1; slurmd PORT+11 .. PORT+10+N
DB=${SLURM_LAB_DB:-0}                # 1: slurmdbd + mariadbd, so that sacct works
CLUSTER=${SLURM_LAB_CLUSTER:-lab}
FIRST_JOB=${SLURM_LAB_FIRST_JOB:-1}  # ports follow from numbers of jobs: labs side by side should not share any
ME=$(id -un)
HOST=$(hostname -s)
SBIN=/usr/sbin

say() { printf 'slurm-lab: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

need_pkgs() {
    local p=() b
    for b in $SBIN/slurmctld:slurmctld $SBIN/slurmd:slurmd /usr/bin/sbatch:slurm-client $SBIN/munged:munge; do
        [ -x "${b%%:*}" ] || p+=("${b##*:}")
    done
    if [ "$DB" = 1 ]; then
        [ -x $SBIN/slurmdbd ] || p+=(slurmdbd)
        [ -x $SBIN/mariadbd ] || p+=(mariadb-server)
    fi
    echo "${p[@]-}"
}

install() {
    local p; p=$(need_pkgs)
    [ -z "$p" ] && { say "packages present"; return; }
    [ "$(id -u)" = 0 ] || die "install needs root: apt-get install $p"
    export DEBIAN_FRONTEND=noninteractive
    # a machine whose packages would start daemons by themselves: forbid it while we install
    local guard=/usr/sbin/policy-rc.d made=
    if [ ! -e $guard ]; then printf '#!/bin/sh\nexit 101\n' > $guard; chmod 755 $guard; made=1; fi
    apt-get update -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $p
    [ -z "$made" ] || rm -f $guard
}

# ---- processes: a pid file each; a pid counts only if its command line names our directory
pid_of() {  # name -> pid when alive and ours
    local f="$LAB/run/$1.pid" p
    [ -s "$f" ] || return 1
    p=$(tr -dc 0-9 < "$f")
    [ -n "$p" ] && [ -r "/proc/$p/cmdline" ] || return 1
    # ours: our directory in the command line, or (slurmdbd takes no -f) in the environment
    tr '\0' ' ' < "/proc/$p/cmdline" | grep -qF -- "$LAB/" ||
        { grep -qa slurmdbd "/proc/$p/cmdline" && tr '\0' '\n' < "/proc/$p/environ" | grep -qxF -- "SLURM_CONF=$LAB/etc/slurm.conf"; } || return 1
    echo "$p"
}
gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
end() {  # name [signal]
    local p i
    p=$(pid_of "$1") || return 0
    kill "-${2:-TERM}" "$p" 2>/dev/null || true
    for i in $(seq 200); do gone "$p" && break; sleep 0.05; done
    gone "$p" || kill -KILL "$p" 2>/dev/null || true
    rm -f "$LAB/run/$1.pid"
}
wait_for() {  # seconds what command...
    local n=$(( $1 * 20 )) what=$2 i; shift 2
    for i in $(seq "$n"); do "$@" >/dev/null 2>&1 && return 0; sleep 0.05; done
    die "$what did not come up; see $LAB/log"
}

slurm_version() { $SBIN/slurmd -V | awk '{print $2}'; }

write_conf() {
    mkdir -p "$LAB"/{etc,run,log,spool,state,dev,db}
    chmod 755 "$LAB" "$LAB/spool" "$LAB/state"
    local key="$LAB/etc/munge.key" i gres= acct
    if [ ! -s "$key" ]; then ( umask 077; head -c 1024 /dev/urandom > "$key" ); chmod 400 "$key"; fi
    if [ "$GPUS" -gt 0 ]; then
        gres="Gres=gpu:fake:$GPUS"
        # one file a GPU: Slurm takes CUDA_VISIBLE_DEVICES from the number at the end of its name
        for i in $(seq 0 $((GPUS - 1))); do [ -e "$LAB/dev/gpu$i" ] || ln -s /dev/null "$LAB/dev/gpu$i"; done
        echo "NodeName=node[1-$NODES] Name=gpu Type=fake File=$LAB/dev/gpu[0-$((GPUS - 1))]" > "$LAB/etc/gres.conf"
    else
        : > "$LAB/etc/gres.conf"
    fi
    # no cgroups: >= 23.02 can say so; 22.05 must load a plugin (v1 touches nothing with linuxproc/none); older has no such key
    case $(slurm_version) in
        2[0-1].*|1*) : > "$LAB/etc/cgroup.conf" ;;
        22.*) echo "CgroupPlugin=cgroup/v1" > "$LAB/etc/cgroup.conf" ;;
        *) echo "CgroupPlugin=disabled" > "$LAB/etc/cgroup.conf" ;;
    esac
    if [ "$DB" = 1 ]; then
        acct="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 1))
AccountingStoragePass=$LAB/run/munge.socket
AccountingStorageTRES=gres/gpu"
    else
        acct="AccountingStorageType=accounting_storage/none"
    fi
    cat > "$LAB/etc/slurm.conf" <<CONF
ClusterName=$CLUSTER
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
FirstJobId=$FIRST_JOB
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd-%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=50000,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
MessageTimeout=10
KillWait=2
BatchStartTimeout=20
InactiveLimit=0
MinJobAge=3600
JobRequeue=1
EnforcePartLimits=ALL
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.log
GresTypes=$([ "$GPUS" -gt 0 ] && echo gpu)
$acct
NodeName=node[1-$NODES] NodeHostName=$HOST NodeAddr=127.0.0.1 Port=[$((PORT + 11))-$((PORT + 10 + NODES))] CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=2 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
CONF
    [ "$GPUS" -gt 0 ] || sed -i '/^GresTypes=$/d' "$LAB/etc/slurm.conf"
    rm -f "$LAB/bin/sacct"
    if [ "$DB" != 1 ]; then   # no accounting: a sacct that answers -j from slurmctld's memory (MinJobAge), enough for nemo-run
        mkdir -p "$LAB/bin"
        cat > "$LAB/bin/sacct" <<'SHIM'
#!/bin/bash
# sacct --parsable2 -j ID, answered by scontrol (this cluster has no slurmdbd)
while [ $# -gt 0 ]; do case $1 in -j|--jobs) id=$2; shift ;; --jobs=*) id=${1#*=} ;; -j*) id=${1#-j} ;; esac; shift; done
echo 'JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode'
for j in ${id//,/ }; do
    scontrol show job "$j" -o 2>/dev/null | awk '{ for (i = 1; i <= NF; i++) { k = index($i, "="); v[substr($i, 1, k - 1)] = substr($i, k + 1) }
        print v["JobId"] "|" v["JobName"] "|" v["Partition"] "|" v["Account"] "|" v["NumCPUs"] "|" v["JobState"] "|" v["ExitCode"] }'
done
SHIM
        chmod 755 "$LAB/bin/sacct"
    fi
    if [ "$DB" = 1 ]; then
        cat > "$LAB/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT + 1))
SlurmUser=$ME
PidFile=$LAB/run/slurmdbd.pid
LogFile=$LAB/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=$ME
StorageLoc=slurm_acct_lab
CONF
        chmod 600 "$LAB/etc/slurmdbd.conf"
        # libmariadb takes the socket from here; unix_socket authentication: no password anywhere
        printf '[client]\nsocket=%s\n[client-server]\nsocket=%s\n' "$LAB/run/mysql.sock" "$LAB/run/mysql.sock" > "$LAB/etc/my.cnf"
    fi
}

start_munge() {
    pid_of munged >/dev/null && return
    rm -f "$LAB/run/munge.socket"
    $SBIN/munged --key-file="$LAB/etc/munge.key" --socket="$LAB/run/munge.socket" \
        --pid-file="$LAB/run/munged.pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munged.seed" --num-threads=4
    wait_for 10 munged munge -n -S "$LAB/run/munge.socket"
}
start_db() {
    [ "$DB" = 1 ] || return 0
    if ! pid_of mariadbd >/dev/null; then
        if [ ! -d "$LAB/db/mysql" ]; then
            mariadb-install-db --no-defaults --datadir="$LAB/db" --user="$ME" --auth-root-authentication-method=socket \
                --auth-root-socket-user="$ME" --skip-test-db > "$LAB/log/mariadb-install.log" 2>&1
        fi
        setsid $SBIN/mariadbd --no-defaults --datadir="$LAB/db" --socket="$LAB/run/mysql.sock" --skip-networking \
            --pid-file="$LAB/run/mariadbd.pid" --user="$ME" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
            > "$LAB/log/mariadbd.log" 2>&1 < /dev/null &
        wait_for 30 mariadbd mariadb --no-defaults --socket="$LAB/run/mysql.sock" -e 'select 1'
        mariadb --no-defaults --socket="$LAB/run/mysql.sock" -e \
            "create database if not exists slurm_acct_lab; create user if not exists '$ME'@localhost identified via unix_socket; grant all on slurm_acct_lab.* to '$ME'@localhost"
    fi
    if ! pid_of slurmdbd >/dev/null; then
        MARIADB_HOME="$LAB/etc" MYSQL_HOME="$LAB/etc" MYSQL_UNIX_PORT="$LAB/run/mysql.sock" SLURM_CONF="$LAB/etc/slurm.conf" \
            setsid $SBIN/slurmdbd -D > "$LAB/log/slurmdbd.out" 2>&1 < /dev/null &
        echo $! > "$LAB/run/slurmdbd.pid"
        wait_for 30 slurmdbd sacctmgr -i -Q show cluster
    fi
    sacctmgr -n -P show cluster format=cluster | grep -qx "$CLUSTER" || sacctmgr -i -Q add cluster "$CLUSTER" > /dev/null || true
}
start_node() {
    pid_of "slurmd-node$1" >/dev/null && return
    mkdir -p "$LAB/spool/node$1"
    $SBIN/slurmd -f "$LAB/etc/slurm.conf" -N "node$1"   # daemonizes, writes its pid file itself
}
kill_node() {
    local p par
    end "slurmd-node$1" KILL
    # the tasks of that node carry its name in their environment; their parent is the slurmstepd
    for p in /proc/[0-9]*; do
        grep -zqxF "SLURMD_NODENAME=node$1" "$p/environ" 2>/dev/null &&
            grep -zqxF "SLURM_CONF=$LAB/etc/slurm.conf" "$p/environ" 2>/dev/null || continue
        par=$(awk '/^PPid:/{print $2}' "$p/status" 2>/dev/null) || continue
        [ "$(cat "/proc/$par/comm" 2>/dev/null)" = slurmstepd ] && kill -KILL "$par" 2>/dev/null || true
        kill -KILL "${p#/proc/}" 2>/dev/null || true
    done
}
start_controller() {
    pid_of slurmctld >/dev/null && return
    (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null && die "port $PORT is taken by someone else: set SLURM_LAB_PORT"
    $SBIN/slurmctld -f "$SLURM_CONF"
    wait_for 20 slurmctld scontrol ping
}
all_idle() {
    local n; n=$(sinfo -h -N -p debug -t idle,mixed,allocated -o %N | sort -u | wc -l)
    [ "$n" -ge "$NODES" ]
}
start() {
    local p i t0; t0=$(date +%s.%N)
    p=$(need_pkgs); [ -z "$p" ] || die "missing packages: $p (run: $0 install)"
    write_conf
    export SLURM_CONF="$LAB/etc/slurm.conf"
    start_munge
    start_db
    start_controller
    for i in $(seq "$NODES"); do start_node "$i"; done
    scontrol update nodename="node[1-$NODES]" state=resume >/dev/null 2>&1 || true
    wait_for 30 "nodes" all_idle
    say "up in $(awk -v a="$t0" -v b="$(date +%s.%N)" 'BEGIN{printf "%.1f", b-a}') s: $NODES nodes x $CPUS cpus x $GPUS fake gpus; eval \"\$($0 env)\""
}
stop() {
    local i
    export SLURM_CONF="$LAB/etc/slurm.conf"
    if pid_of slurmctld >/dev/null && [ -n "$(squeue -h -o %i 2>/dev/null)" ]; then
        # shellcheck disable=SC2046
        scancel $(squeue -h -o %i) 2>/dev/null || true
        for i in $(seq 100); do [ -z "$(squeue -h -o %i 2>/dev/null)" ] && break; sleep 0.1; done
    fi
    for i in "$LAB"/run/slurmd-node*.pid; do [ -e "$i" ] && end "$(basename "$i" .pid)"; done
    end slurmctld; end slurmdbd; end mariadbd; end munged
    say stopped
}
status() {
    local n; for n in munged mariadbd slurmdbd slurmctld $(seq -f 'slurmd-node%g' "$NODES"); do
        printf '%-14s %s\n' "$n" "$(pid_of "$n" || echo -)"
    done
    SLURM_CONF="$LAB/etc/slurm.conf" sinfo -N -o '%N %t %c %G' 2>/dev/null || true
}
case "${1:-}" in
    install) install ;;
    missing) need_pkgs ;;
    start) start ;;
    stop) stop ;;
    restart) stop; start ;;
    status) status ;;
    clean) [ -e "$LAB/etc/slurm.conf" ] || [ ! -e "$LAB" ] || die "$LAB is not a lab"; stop; rm -rf -- "$LAB" ;;
    kill-node) kill_node "$2" ;;
    start-node) export SLURM_CONF="$LAB/etc/slurm.conf"; start_node "$2" ;;
    kill-controller) end slurmctld KILL ;;
    start-controller) export SLURM_CONF="$LAB/etc/slurm.conf"; start_controller ;;
    env) printf 'export SLURM_CONF=%q\n' "$LAB/etc/slurm.conf"
         [ ! -x "$LAB/bin/sacct" ] || printf 'export PATH=%q:"$PATH"\n' "$LAB/bin" ;;
    *) sed -n '2,21p' "$0"; exit 2 ;;
esac
