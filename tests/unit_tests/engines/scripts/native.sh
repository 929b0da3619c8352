#!/bin/bash
# Written by pytest-megatron with nemo-run
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=megatron-2x8
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='/shared/nemo_run tests/run 1/engine/logs/%x-%j.out'
#SBATCH --segment=2
#SBATCH --time=00:40:00

set -vx
export PYTHONUNBUFFERED=1
export SLURM_UNBUFFEREDIO=1

spec=${1:?no spec is given}
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

srun --output=all --chdir=/shared/project --wait=60 --kill-on-bad-exit=1 /opt/py/bin/python -m pytest_megatron.engines.worker "$spec"
exitcode=$?
echo "job exited with code $exitcode"
exit $exitcode
