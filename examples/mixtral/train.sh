#!/usr/bin/env bash
# Mixtral at toy size: eight experts, two for each token, an auxiliary loss. Further arguments, such as a layout, come last and win.
#   mt-resilient run -- bash examples/mixtral/train.sh --expert-model-parallel-size 2 --use-distributed-optimizer
source "$(dirname "$0")/../gpt/toy.sh"
EXPERTS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall
)
toy --group-query-attention --num-query-groups 2 "${EXPERTS[@]}" "$@"
