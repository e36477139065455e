#!/usr/bin/env bash
# DeepSeek-V3 at toy size: multi-latent attention, a router of sigmoids whose bias balances the experts, a head that predicts one more
# token. Further arguments, such as a layout, come last and win.
#   mt-resilient run -- bash examples/deepseek_v3/train.sh --expert-model-parallel-size 2 --use-distributed-optimizer
source "$(dirname "$0")/../gpt/toy.sh"
ATTENTION=(
    --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm
    --rotary-scaling-factor 1
)
EXPERTS=(
    --num-experts 8 --moe-layer-freq "[0,1]" --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2
    --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
)
NEXT_TOKENS=(--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1)
toy "${ATTENTION[@]}" "${EXPERTS[@]}" "${NEXT_TOKENS[@]}" "$@"
