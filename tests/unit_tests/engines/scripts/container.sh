#!/bin/bash
# Written by pytest-megatron with nemo-run
#SBATCH --account=team
#SBATCH --constraint='h100&ib'
#SBATCH --contiguous
#SBATCH --cpus-per-task=32
#SBATCH --exclude='node[3-4],node9'
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=megatron-2x8
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/logs/%x-%j.out
#SBATCH --partition=batch
#SBATCH --segment=2
#SBATCH --switches=1
#SBATCH --time=00:40:00

set -vx
export PYTHONUNBUFFERED=1
export SLURM_UNBUFFEREDIO=1

spec=${1:?no spec is given}
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
set -e
export ENROOT_CACHE='a b $HOME '"'"'c'"'"' "d"
e'
export NCCL_DEBUG=INFO
module load cuda
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 mkdir -p /scratch /uv/cache
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 '--container-image=/images/dev image.sqsh' --container-mounts=/data:/data:ro,/shared/project:/shared/project,/shared/run:/shared/run,/scratch:/scratch,/uv/cache:/uv/cache --container-workdir=/shared/project --no-container-mount-home bash -euxc 'export UV_PROJECT_ENVIRONMENT=/scratch/venv; export UV_CACHE_DIR=/uv/cache; cd /shared/project; uv sync --frozen --inexact --extra dev --no-install-project; uv sync --frozen --extra dev'
set +e

srun --output=all '--container-image=/images/dev image.sqsh' --container-mounts=/data:/data:ro,/shared/project:/shared/project,/shared/run:/shared/run,/scratch:/scratch,/uv/cache:/uv/cache --container-workdir=/shared/project --no-container-mount-home --cpus-per-task=32 --wait=60 --kill-on-bad-exit=1 --cpu-bind=none --mpi=pmix /scratch/venv/bin/python -m pytest_megatron.engines.worker "$spec"
exitcode=$?
echo "job exited with code $exitcode"
exit $exitcode
