#!/usr/bin/env bash
# DeepSeek-V2 at toy size: multi-latent attention, a dense first layer, shared experts, groups of experts, an auxiliary loss of each
# sequence. Further arguments, such as a layout, come last and win.
#   mt-resilient run -- bash examples/deepseek_v2/train.sh --expert-model-parallel-size 2 --use-distributed-optimizer
source "$(dirname "$0")/../gpt/toy.sh"
ATTENTION=(
    --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm
    --rotary-scaling-factor 1
)
EXPERTS=(
    --num-experts 8 --moe-layer-freq "[0,1]" --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-pre-softmax --moe-router-topk-scaling-factor 16
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3e-3 --moe-token-dispatcher-type alltoall
)
toy "${ATTENTION[@]}" "${EXPERTS[@]}" "$@"
