#!/usr/bin/env bash
# Train on all hosts of a TPU slice (v4 and later), with a process for each chip. Run on every host:
#
#     gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#         --command='cd project && examples/cluster/tpu_slice.sh train.py --lr 1e-3'
#
# In GKE it is the command of each pod. It has not been run on a TPU yet.
set -euo pipefail

# What this host is among those of the slice, as torch_xla reads it from the TPU's metadata or variables.
hosts=$(python -c '
from torch_xla._internal import tpu
addresses = tpu.get_worker_ips()
print(tpu.worker_id(), len(addresses), addresses[0], tpu.num_available_chips())
' | tail -n 1)
read -r node_rank num_nodes master_addr num_chips <<<"$hosts"

export PJRT_DEVICE=${PJRT_DEVICE:-TPU}
exec torchacc launch \
    --nproc "${CHIPS:-$num_chips}" \
    --num-nodes "$num_nodes" \
    --node-rank "$node_rank" \
    --master-addr "$master_addr" \
    --master-port "${MASTER_PORT:-29500}" \
    "$@"
