# Read by every bash of a recipe's script: Megatron-LM's call yq by the place that it has in their
# container.
[ -x /usr/local/bin/yq ] || function /usr/local/bin/yq { yq "$@"; }
