#!/bin/bash
# Does to a project what a test driver written for a container does: takes KEY=VALUE words, rewrites
# the case in place, fills its variables in beside it, trains by `uv run`, once or twice a repeat.
set -euo pipefail
for word in "$@"; do
  export "${word%%=*}"="${word#*=}"
done
yq_here=/usr/local/bin/yq
kind=$($yq_here '.TEST_TYPE' < "$TRAINING_PARAMS_PATH")
/usr/local/bin/yq -i '.MODEL_ARGS."--exit-interval" = .MODEL_ARGS."--train-iters"' "$TRAINING_PARAMS_PATH"
if [[ "$(/usr/local/bin/yq '.ENV_VARS.ENABLE_LIGHTWEIGHT_MODE // "false"' "$TRAINING_PARAMS_PATH")" == true
  || "${ENABLE_LIGHTWEIGHT_MODE:-}" == true ]]; then
  /usr/local/bin/yq -i '.ENV_VARS."SKIP_PYTEST" = 1 | .MODEL_ARGS."--exit-interval" = 4' "$TRAINING_PARAMS_PATH"
fi
train() {
  envsubst "$(env | cut -d= -f1 | sed -e 's/^/$/')" < "$TRAINING_PARAMS_PATH" > "$TRAINING_PARAMS_PATH.tmp"
  local words=() line
  while IFS= read -r line; do
    [[ "${line#*: }" == true ]] && words+=("${line%%:*}") || words+=("${line%%:*}" "${line#*: }")
  done < <(/usr/local/bin/yq '... comments="" | .[env(KEY)] | to_entries | .[] | .key + ": " + (select(.value != "") | .value | tostring)' "$TRAINING_PARAMS_PATH.tmp")
  uv run --no-sync python "$TRAINING_SCRIPT_PATH" "${words[@]}"
}
export KEY=MODEL_ARGS
base=$TENSORBOARD_PATH
for repeat in $(seq 1 "$N_REPEAT"); do
  export TENSORBOARD_PATH=$(dirname "$base")/$repeat/$(basename "$base")
  first=$TENSORBOARD_PATH
  [[ "$kind" == ckpt-resume ]] && export TENSORBOARD_PATH=$first/run_1
  mkdir -p "$TENSORBOARD_PATH"
  train
  if [[ "$kind" == ckpt-resume ]]; then
    rm -rf "$CHECKPOINT_SAVE_PATH/iter_0000010"
    echo 5 > "$CHECKPOINT_SAVE_PATH/latest_checkpointed_iteration.txt"
    export CHECKPOINT_LOAD_PATH=$CHECKPOINT_SAVE_PATH TENSORBOARD_PATH=$first/run_2
    mkdir -p "$TENSORBOARD_PATH"
    train
  fi
done
