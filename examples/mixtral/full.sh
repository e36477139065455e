#!/usr/bin/env bash
# Mixtral 8x7B on the hosts of a hostfile; four ranks share the experts: mt-resilient run -- bash examples/mixtral/full.sh
source "$(dirname "$0")/../gpt/hosts.sh"
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --norm-epsilon 1e-5 --rotary-base 1000000 --init-method-std 0.01
)
EXPERTS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
PARALLEL=(--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1)
launch "${MODEL[@]}" "${EXPERTS[@]}" "${PARALLEL[@]}" --global-batch-size 1024 --train-samples 24414062 --lr 3e-4 --min-lr 3e-5
