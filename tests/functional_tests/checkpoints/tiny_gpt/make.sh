#!/usr/bin/env bash
# Makes the frozen checkpoint anew: the middle of the training that the case frozen_resume has.
# To be run only when a change is meant to break with old checkpoints; say so in its changelog.
set -euo pipefail
cd "$(dirname "$0")"
rm -rf iter_* latest_checkpointed_iteration.txt
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 python ../../train_gpt.py \
  --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 \
  --max-position-embeddings 16 --vocab-size 64 --untie-embeddings-and-output-weights \
  --micro-batch-size 4 --global-batch-size 8 --train-iters 20 --lr 3.0e-3 \
  --lr-decay-style cosine --seed 1234 --deterministic-mode \
  --exit-interval 10 --save . --save-interval 10 --ckpt-format torch_dist
