#!/usr/bin/env bash
# Llama 3 at toy size: grouped-query attention, a large rotary base. Further arguments, such as a layout, come last and win.
#   mt-resilient run -- bash examples/llama3/train.sh --tensor-model-parallel-size 2 --sequence-parallel
source "$(dirname "$0")/../gpt/toy.sh"
toy --group-query-attention --num-query-groups 2 --rotary-base 500000 "$@"
