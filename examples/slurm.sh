#!/bin/bash
#SBATCH --job-name=controller --ntasks=1 --cpus-per-task=1 --time=1-00:00:00
#SBATCH --signal=B:USR1@120 --no-requeue --open-mode=append
# The controller of a run, in a small job of its own; its workers are in jobs that it submits. Before its time is up, and
# where it is preempted, it writes a checkpoint and submits itself again; scancel ends it. OUT lies where all nodes see it.
#
#   OUT=/shared/run sbatch slurm.sh train.py --workers 1:16 --cluster slurm:agents=jobs,partition=gpu,time=8:00:00
elastune run "$@" --out "$OUT" --resume &
run=$!
trap 'kill -USR1 $run' USR1
trap 'kill -USR1 $run; [[ $(scontrol show job $SLURM_JOB_ID) == *PreemptTime=2* ]] || cancelled=yes' TERM
while wait $run; code=$?; ((code > 128)) && kill -0 $run 2>/dev/null; do :; done
[[ $code != 75 || $cancelled ]] || exec sbatch "$0" "$@"
exit $code
