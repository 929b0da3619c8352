#!/bin/bash
# Written by pytest-megatron with nemo-run
#SBATCH --job-name=megatron-1x2
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/nemo_run tests/run 1/engine/logs/%x-%j.out'
#SBATCH --time=00:20:00

set -vx
export PYTHONUNBUFFERED=1
export SLURM_UNBUFFEREDIO=1

spec=${1:-'/shared/nemo_run tests/run 1/engine/specs/1.json'}
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

srun --output=all --chdir=/shared/project --wait=60 --kill-on-bad-exit=1 '/opt/my py/bin/python' -m pytest_megatron.engines.worker "$spec"
exitcode=$?
echo "job exited with code $exitcode"
exit $exitcode
