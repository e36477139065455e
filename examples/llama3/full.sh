#!/usr/bin/env bash
# Llama 3 8B on the hosts of a hostfile, in two pipeline stages: mt-resilient run -- bash examples/llama3/full.sh
source "$(dirname "$0")/../gpt/hosts.sh"
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --norm-epsilon 1e-5 --rotary-base 500000 --init-method-std 0.008
)
PARALLEL=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2)
launch "${MODEL[@]}" "${PARALLEL[@]}" --global-batch-size 1024 --train-samples 24414062 --lr 3e-4 --min-lr 3e-5
