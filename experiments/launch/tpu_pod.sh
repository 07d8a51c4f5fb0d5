#!/bin/bash
# Trains on a Cloud TPU pod slice: one process on each of its hosts.
#
#   bash experiments/launch/tpu_pod.sh
#
# Edit the lines marked EDIT. The same command goes on from the last checkpoint. The
# hosts share a workdir, for example a Filestore share or a bucket mounted by gcsfuse.
# (Checked here: shell syntax. It has not run on a TPU.)
#
# Regions inside one slice share its fast interconnect, so the exchange goes into the
# program, where XLA's asynchronous collectives hide it. Slices in different regions of
# the world are told of one another by --coordinator_address and the others, as any
# other hosts, and exchange on the outer mesh (the default).

set -euo pipefail

tpu=cocodc                         # EDIT: name of the TPU VM
zone=us-central2-b                 # EDIT
checkout=/mnt/shared/cocodc_jax    # EDIT: seen by all hosts, or copied to each
environment=/mnt/shared/venv       # EDIT: with `pip install -e $checkout[all,tpu]`
workdir=/mnt/shared/runs/cocodc    # EDIT: seen by all hosts

# num_processes=0: JAX finds coordinator, count and id in the TPU's metadata.
train="python -m experiments.train \
  --num_processes=0 \
  --preset=paper_150m --method=cocodc --regions=4 --data_axis=4 --exchange=program \
  --checkpoint_every=500 \
  --workdir=$workdir"              # EDIT: the run; data_axis: chips of a region

# exec: what ends the connection ends the training. worker=all: on every host at once.
gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all \
  --command="cd $checkout && source $environment/bin/activate && exec $train"
